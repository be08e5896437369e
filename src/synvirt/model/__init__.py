"""The nouns on the wire and inside, a file a subject: one frozen pydantic model each, no I/O.

    values     numbers, names, times; the base models
    problems   what went wrong
    kinds      kinds of sources, modes, states
    machine    the VM as its source describes it
    access     endpoints, certificates, credentials
    times      moments and schedules
    plan       what a caller asks for
    job        what a migration is, and how far
    sources    registered platforms
    files      host files and uploads

Each imports only from files above it.
"""
