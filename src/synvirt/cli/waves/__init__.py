"""synvirt waves. `commands.py` lists the commands; `documents.py` has those that read and write whole waves, `showing.py` those
that show one, `acting.py` those that change how one goes on. `asking.py` is what they share."""
