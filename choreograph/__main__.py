"""`python -m choreograph`."""

from .cli import main

main()
