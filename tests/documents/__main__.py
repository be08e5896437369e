"""Writes the documents that are made from the code: `python -m tests.documents`."""

from tests.documents.made import DOCS, api, openapi, troubleshooting

(DOCS / "troubleshooting.md").write_text(troubleshooting())
(DOCS / "api.md").write_text(api(openapi()))
