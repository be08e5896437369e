"""A Hyper-V host for tests of wmi_api, in the test's own process.

wsman.py   WinRM with PowerShell remoting, as far as our scripts need it: HTTPS, log-in, shells, pipelines
model.py   what the scripts would find and do there: VMs, recovery snapshots, reference points, RCT
files.py   the VMs' VHDX and AVHDX files, real ones, which Samba serves and change as the guests write
host.py    all of it put together
"""
