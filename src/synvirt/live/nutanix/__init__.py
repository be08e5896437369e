"""prism_api: Nutanix AHV by Prism Central (v4) and Prism Element (v3). adapter.py keeps the laws of LiveAdapter; its parts:

form.py      what a source takes                    prism.py     one Prism: requests, refusals, retries
central.py   Prism Central, v4                      element.py   Prism Element, v3 and v2
rights.py    what our user may do
machines.py  VMs as rows and manifests              ways.py      by which way disks are read, and why by no better one

The three ways hold a VM's disks at one moment and read them: snapshots.py (vm_snapshots and NFS), volumes.py (recovery points
and iSCSI), images.py (image download: cold only). allow_list.py lets this host in to a container, where its operator permits.
"""
