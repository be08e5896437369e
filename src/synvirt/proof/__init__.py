"""Evidence that a move went well: `health.py` checks a guest that booted; receipts record what was moved, signed, so that
anybody can check it later without us.

`signing.py` (a host's key, SSHSIG, DSSE), `bag.py` (writes the folder of a receipt), `verifying.py` (reads and checks one),
`keeping.py` (a host's receipts, each chained to the one before).

    receipt-JOB/  bagit.txt  manifest-sha256.txt  tagmanifest-sha256.txt  allowed_signers
                  statement.json.sig (SSHSIG)  receipt.dsse.json (DSSE)
                  data/statement.json (in-toto)  data/plan.json  data/disk0.sha256 …
                  data/rehearsal.json (in-toto, test-result)
"""
