"""Commands: the command line, the compiler gate, the selftest, generated headers and pages."""
