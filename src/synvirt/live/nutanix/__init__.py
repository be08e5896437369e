"""prism_api: Nutanix AHV by Prism Central (v4) and Prism Element (v3). adapter.py is the LiveAdapter; its parts:

form.py      the settings of a source               prism.py     one Prism: requests, refusals, retries
central.py   Prism Central, v4                      element.py   Prism Element, v3 and v2
rights.py    what our user may do               pages.py     lists that change while they are read
machines.py  VMs as rows and manifests              ways.py      the way to read disks, and why no better one

The three ways freeze a VM's disks at one moment and read them: snapshots.py (vm_snapshots and NFS), volumes.py (recovery points
and iSCSI), images.py (image download: cold only). allow_list.py gives this host access to a container, if its operator permits
it.
"""
