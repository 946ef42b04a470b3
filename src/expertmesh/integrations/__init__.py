"""Doors to other systems: one module each, which imports the other system only where it needs it, and no other door."""
