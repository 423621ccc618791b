"""Serving: caches of users' histories between requests."""
