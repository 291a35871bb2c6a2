"""Command line of choreograph."""
