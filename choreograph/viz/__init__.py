"""Pictures of what happened. Reads finished messages; changes nothing."""
