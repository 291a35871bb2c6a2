"""`python -m choreograph`."""

from .cli.main import main

main()
