"""AsyncEngine and its parts."""
