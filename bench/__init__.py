"""How fast the data path is, as ratios against other tools in the same run: `python -m bench --help`.

sources  the images, made once from real files, in memory (tmpfs)
rows     what is measured: our command, the peer's command, the ratio to reach
measure  whole processes: wall time and peak memory, interleaved, medians

Scripts of their own, by what they measure: `platforms` (live sources), `service`, `chaos`; the others are beside this file.
"""
