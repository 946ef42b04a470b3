"""Command line, one file per verb, which parses arguments, calls the library and prints."""
