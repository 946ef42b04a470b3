"""Integrations with other libraries: one module each, which imports its library on use, and no other integration."""
