"""How the service reaches a platform's control plane over the network. Blocking code, safe from several threads.

tls.py   trust: this host's authorities, or a certificate that the operator pinned
http.py  HttpClient: requests and streams over pooled connections, with limits
https.py http.client's connections, for a single request and for libraries that take a class

All connect through the guard (outgoing.py).
"""

from synvirt.transport.http import Answer, AnswerTooLarge, HttpClient, Recorder, Stream, Trust

__all__ = ["Answer", "AnswerTooLarge", "HttpClient", "Recorder", "Stream", "Trust"]
