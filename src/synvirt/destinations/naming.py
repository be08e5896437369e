"""Turns labels of disks, which people chose, into names that every destination takes."""

import hashlib
import re

# A file name has at most 255 bytes, and so has the whole path of a zfs dataset. The rest is for the job's id, the digest, a
# suffix.
LABEL_CHARS_MAX = 100
# 6 bytes of digest: two labels of one job that are sanitized to the same name collide once in 10^14 jobs.
DIGEST_BYTES = 6


def sanitized_label(label: str) -> str:
    """A label as a name of letters, digits, `-`, `_` and `.`. A label that is one already stays; else a digest of the original
    is added, so that «a b» and «a_b» stay two disks."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", label).lstrip(".-")[:LABEL_CHARS_MAX]
    # A label that already ends like a digest gets one too: else somebody could make it collide.
    if safe == label and safe and not re.search(r"-[0-9a-f]{12}$", safe):
        return safe
    digest = hashlib.blake2b(label.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return f"{safe or 'disk'}-{digest}"
