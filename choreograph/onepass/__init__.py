"""A whole run of a workflow in one forward pass, since every token is known."""
