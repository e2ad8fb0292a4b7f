"""What operators watch while it happens."""
