"""Labels of disks, which people chose, as names that any destination takes."""

import hashlib
import re

# A file name holds 255 bytes, and a zfs dataset's whole path as many: what is left is for the job's id, the digest, a suffix.
LABEL_CHARS_MAX = 100
# 6 bytes of digest: two labels of one job that sanitize alike collide once in 10^14 jobs.
DIGEST_BYTES = 6


def sanitized_label(label: str) -> str:
    """A label as a name of letters, digits, `-`, `_` and `.`: itself where it is one already, else with a digest of the
    original behind it, so that «a b» and «a_b» stay two disks."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", label).lstrip(".-")[:LABEL_CHARS_MAX]
    # A label that ends as if it had a digest gets one of its own: else it could be made to collide.
    if safe == label and safe and not re.search(r"-[0-9a-f]{12}$", safe):
        return safe
    digest = hashlib.blake2b(label.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return f"{safe or 'disk'}-{digest}"
