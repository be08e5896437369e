"""What shows that a move went well: `health.py` asks a guest that booted, and receipts say what was moved, signed, so that
anybody can check it later without us.

`signing.py` (a host's key, SSHSIG, DSSE), `bag.py` (the folder of a receipt, written), `verifying.py` (read, and doubted),
`keeping.py` (a host's receipts, each chained to the one before).

    receipt-JOB/  bagit.txt  manifest-sha256.txt  tagmanifest-sha256.txt  allowed_signers
                  statement.json.sig (SSHSIG)  receipt.dsse.json (DSSE)
                  data/statement.json (in-toto)  data/plan.json  data/disk-0.sha256 …
"""
