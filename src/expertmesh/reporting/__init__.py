"""A page to look at: what runs learned, and what their experts did."""
