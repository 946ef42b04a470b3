"""Claims of the systems that mixture-of-experts models are known from, measured on small models."""
