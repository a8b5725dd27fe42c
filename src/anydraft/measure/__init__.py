"""What can be measured on anybody's models."""
