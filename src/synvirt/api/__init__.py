"""The HTTP interface: routes, errors as problems, authentication, the stream of updates, the two sockets."""

from synvirt.api.app import Site, create_app
from synvirt.api.callers.auth import authenticator
from synvirt.api.listening import Listening
from synvirt.api.server import Server, data_dir_locked, serve

__all__ = ["Listening", "Server", "Site", "authenticator", "create_app", "data_dir_locked", "serve"]
