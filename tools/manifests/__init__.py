"""Kubernetes objects for a recipe (tools/make_manifests.py)."""
