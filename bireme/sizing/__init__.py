"""What a deployment would do under a load, from measured step times and without its hardware."""
