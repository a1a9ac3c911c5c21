"""What model families have in common, and their exceptions."""
