"""Copies of requests for another launch, whose answers are compared with those that clients got."""
