"""synvirt waves. `commands.py` lists the commands; `documents.py` reads and writes whole waves, `showing.py` shows one,
`acting.py` changes how one goes on. `asking.py` has their common parts."""
