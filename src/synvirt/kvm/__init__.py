"""libvirt on this host: what every room that talks to it needs. Blocking code. Read in this order:

library.py     importing python3-libvirt, and what to do where it is missing
connection.py  the connection, and the embedded driver's folder; limit.py: the time limit of calls
agent.py       the QEMU guest agent of a running domain; agent_facts.py: its facts of the guest
identity.py    the identity of a domain, read from its XML; foreign_domain.py: of XML from elsewhere, what is allowed
freezing.py    a guest's file systems frozen for a moment; thaw_guard.py thaws if we die
qemu_user.py   the user that QEMU of the embedded driver runs as; handing.py and acl.py give it what it needs
translated.py  the processor of a guest where KVM does not work
qmp.py         QEMU's monitor
half_done.py   calls that were half done as a service was killed: the record of the guest is made true
orphans.py     processes, folders and sockets that a killed service left behind
"""
