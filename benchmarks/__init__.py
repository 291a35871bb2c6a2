"""One script for each claim. `make bench NAME=peers` prints a table and writes JSON with commit and hardware."""
