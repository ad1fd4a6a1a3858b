"""Interfaces that users of other frameworks know, as thin adapters over `engine`."""
