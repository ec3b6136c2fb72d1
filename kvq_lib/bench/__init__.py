"""Measurements that record where they came from."""
