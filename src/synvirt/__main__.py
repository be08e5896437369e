"""`python -m synvirt` is `synvirt`."""

from synvirt.main import main

if __name__ == "__main__":
    main()
