"""Model families; each folder has model.py, and parallelize.py where it can be spread over ranks."""
