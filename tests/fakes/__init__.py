"""Complete stand-ins that pass the same suites as the real things; never mocks."""
