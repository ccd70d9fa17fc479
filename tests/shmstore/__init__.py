"""Tests of the store's Python face over the real core and real processes."""
