"""One script for each claim. `make bench NAME=decode` prints a table and writes JSON with commit and hardware."""
