// Put into govmomi's package "simulator" by `go build -overlay`: what that simulator of vCenter lacks and our tests need.
//
//   - a snapshot freezes each disk: snapshot.config names a file of its own, which /folder serves
//   - backing.changeId in the snapshot's config, QueryChangedDiskAreas with pages, a reset of the tracking
//   - ConsolidateVMDisks_Task; tasks that fail
//   - whether a session is still good, and the end of all sessions and tasks
//   - the files that a running VM's host has locked; hosts by name and certificate
//
// What it proves: our order of calls, our reading of VMware's own types, the bytes. What it cannot prove: VMware's real change
// tracking, its locks, its speed.

package simulator

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"

	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// What the tracking tells apart, and how many areas one answer lists at the most (a real vCenter: 2000).
const trackedBytes = 65536
const areasMax = 8

type tracking struct {
	sync.Mutex
	generation map[string]int              // VM -> the newest changeId's number
	epoch      map[string]int              // VM -> grows when the tracking is reset
	frozen     map[string]map[int32]string // snapshot -> disk key -> a copy of the disk as it was
	visible    map[string][]string         // snapshot -> files that /folder shows while the snapshot is there
	known      map[string]string           // VM/disk key/changeId -> a copy of the disk as it was
	reachable  map[string]bool             // VM/disk key that was stunned since its tracking was switched on
	Silent     bool                        // a VM's own config does not name the change ids of its disks
	disks      []string                    // flat files that tests write to
	Lies       bool                        // nothing was ever written, it says
}

// Tracker must be registered: simulator.Map.AddHandler(simulator.Tracker)
var Tracker = &tracking{
	generation: map[string]int{},
	epoch:      map[string]int{},
	frozen:     map[string]map[int32]string{},
	visible:    map[string][]string{},
	known:      map[string]string{},
	reachable:  map[string]bool{},
}

func (t *tracking) Reference() types.ManagedObjectReference {
	return types.ManagedObjectReference{Type: "Tracking", Value: "tracking"}
}

func (t *tracking) UpdateObject(mo.Reference, []types.PropertyChange) {}

// RemoveObject: a removed snapshot's files are gone for readers; what change ids refer to is kept, as a real host keeps its map.
func (t *tracking) RemoveObject(ref types.ManagedObjectReference) {
	t.Lock()
	defer t.Unlock()
	for _, path := range t.visible[ref.Value] {
		_ = os.Remove(path)
	}
	delete(t.visible, ref.Value)
	delete(t.frozen, ref.Value)
	// The simulator numbers files by how many there are: after some snapshots it takes a disk for a snapshot's file, and removes it.
	for _, disk := range t.disks {
		_ = os.Link(disk+".kept", disk)
	}
}

// PutObject fires when CreateSnapshot_Task registers the snapshot.
func (t *tracking) PutObject(o mo.Reference) {
	snapshot, ok := o.(*VirtualMachineSnapshot)
	if !ok {
		return
	}
	t.Lock()
	defer t.Unlock()
	vm := snapshot.Vm.Value
	on := snapshot.Config.ChangeTrackingEnabled != nil && *snapshot.Config.ChangeTrackingEnabled
	t.generation[vm]++
	files := map[int32]string{}
	devices := append([]types.BaseVirtualDevice{}, snapshot.Config.Hardware.Device...)
	for index, device := range devices {
		disk, ok := device.(*types.VirtualDisk)
		if !ok {
			continue
		}
		backing, ok := disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo)
		if !ok {
			continue
		}
		live := hostPath(backing.FileName)
		suffix := "-" + snapshot.Self.Value
		shown := strings.TrimSuffix(live, ".vmdk") + suffix
		kept := filepath.Join(os.TempDir(), fmt.Sprintf("%s-%d%s", vm, disk.Key, suffix))
		size, err := copyFile(strings.TrimSuffix(live, ".vmdk")+"-flat.vmdk", kept)
		if err != nil {
			continue
		}
		_, _ = copyFile(kept, shown+"-flat.vmdk")
		describe(shown, size)
		t.visible[snapshot.Self.Value] = append(t.visible[snapshot.Self.Value], shown+"-flat.vmdk", shown+".vmdk")
		files[disk.Key] = kept
		frozenDisk, frozenBacking := *disk, *backing
		frozenBacking.ChangeId = ""
		frozenBacking.FileName = strings.TrimSuffix(backing.FileName, ".vmdk") + suffix + ".vmdk"
		place := fmt.Sprintf("%s/%d", vm, disk.Key)
		if on && t.reachable[place] {
			frozenBacking.ChangeId = fmt.Sprintf("52 de ad be ef 00 00 %02x-00 00 00 00 00 00 00 01/%d", t.epoch[vm], t.generation[vm])
			t.known[fmt.Sprintf("%s/%d/%s", vm, disk.Key, frozenBacking.ChangeId)] = kept
		}
		frozenDisk.Backing = &frozenBacking
		devices[index] = &frozenDisk
		t.reachable[place] = on && !switchedOff(snapshot.Config.ExtraConfig, devices, disk)
		// A host keeps what it tracks in a file beside the disk, made and removed by a stun.
		if ctk := strings.TrimSuffix(live, ".vmdk") + "-ctk.vmdk"; t.reachable[place] {
			_ = os.WriteFile(ctk, []byte(vm), 0o600)
		} else {
			_ = os.Remove(ctk)
		}
		backing.ChangeId = ""
		if t.reachable[place] && !t.Silent {
			backing.ChangeId = fmt.Sprintf("52 de ad be ef 00 00 %02x-00 00 00 00 00 00 00 01/%d", t.epoch[vm], t.generation[vm]+1)
		}
	}
	snapshot.Config.Hardware.Device = devices
	t.frozen[snapshot.Self.Value] = files
}

// Is scsi0:0.ctkEnabled of this disk set to FALSE?
func switchedOff(settings []types.BaseOptionValue, devices object.VirtualDeviceList, disk *types.VirtualDisk) bool {
	controller := devices.FindByKey(disk.ControllerKey).(types.BaseVirtualController).GetVirtualController()
	name := fmt.Sprintf("scsi%d:%d.ctkEnabled", controller.BusNumber, *disk.UnitNumber)
	for _, setting := range settings {
		if one := setting.GetOptionValue(); one.Key == name && one.Value == "FALSE" {
			return true
		}
	}
	return false
}

// Reset makes every change id that was given out for this VM meaningless, as a host's crash does.
func (t *tracking) Reset(vm string) {
	t.Lock()
	defer t.Unlock()
	t.epoch[vm]++
}

func hostPath(name string) string {
	var path object.DatastorePath
	path.FromString(name)
	for _, o := range Map.All("Datastore") {
		if ds := o.(*Datastore); ds.Name == path.Datastore {
			return filepath.Join(ds.Info.GetDatastoreInfo().Url, path.Path)
		}
	}
	return ""
}

func copyFile(from, to string) (int64, error) {
	in, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return 0, err
	}
	defer out.Close()
	return io.Copy(out, in)
}

func describe(path string, size int64) {
	text := fmt.Sprintf("# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\n"+
		"# Extent description\nRW %d VMFS \"%s-flat.vmdk\"\n", size/512, filepath.Base(path))
	_ = os.WriteFile(path+".vmdk", []byte(text), 0o600)
}

// SetStoreType of all datastores: VMFS, NFS, vsan, VVOL.
func SetStoreType(kind string) error {
	for _, o := range Map.All("Datastore") {
		o.(*Datastore).Summary.Type = kind
	}
	return nil
}

// RunTools: from now on the VM's guest runs VMware Tools.
func RunTools(vmID string) {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	vm.Guest.ToolsRunningStatus = string(types.VirtualMachineToolsRunningStatusGuestToolsRunning)
}

// LayOver makes the first disk of a VM lie over what it was, as a snapshot of the operator's does: `file` is the new disk's name.
func LayOver(vmID string, file string) error {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	for _, device := range vm.Config.Hardware.Device {
		if disk, ok := device.(*types.VirtualDisk); ok {
			before := disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo)
			after := *before
			after.FileName = before.FileName[:strings.LastIndex(before.FileName, "/")+1] + file
			after.Parent = before
			disk.Backing = &after
			return nil
		}
	}
	return fmt.Errorf("%s has no disk", vmID)
}

// LeaveToConsolidate: the VM has files of a snapshot that is no more, as a removal that failed half-way leaves them.
func LeaveToConsolidate(vmID string) {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	vm.Runtime.ConsolidationNeeded = types.NewBool(true)
}

// Allocate so many bytes of the VM's disks: what its list of files says that they take.
func Allocate(vmID string, size int64) {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	for i := range vm.LayoutEx.File {
		if strings.HasSuffix(vm.LayoutEx.File[i].Name, "-flat.vmdk") {
			vm.LayoutEx.File[i].Size = size
		}
	}
}

// KeepVariables of a VM with UEFI: the file that its firmware keeps them in.
func KeepVariables(vmID string, secure bool) (string, error) {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	vm.Config.Firmware = string(types.GuestOsDescriptorFirmwareTypeEfi)
	vm.Config.BootOptions = &types.VirtualMachineBootOptions{EfiSecureBootEnabled: &secure}
	for _, file := range vm.LayoutEx.File {
		if file.Type == string(types.VirtualMachineFileLayoutExFileTypeNvram) {
			return hostPath(file.Name), nil
		}
	}
	return "", fmt.Errorf("%s has no nvram file", vmID)
}

// PlugIntoOpaque network, one of NSX, the first card of a VM; the network is made.
func PlugIntoOpaque(vmID string, id string, name string) error {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	for _, o := range Map.All("Datacenter") {
		folder := Map.Get(o.(*Datacenter).NetworkFolder).(*Folder)
		if err := folder.AddOpaqueNetwork(types.OpaqueNetworkSummary{
			NetworkSummary: types.NetworkSummary{Name: name}, OpaqueNetworkId: id,
		}); err != nil {
			return err
		}
		vm.Network = append(vm.Network, Map.FindByName(name, folder.ChildEntity).Reference())
	}
	for _, device := range vm.Config.Hardware.Device {
		if card, ok := device.(types.BaseVirtualEthernetCard); ok {
			card.GetVirtualEthernetCard().Backing = &types.VirtualEthernetCardOpaqueNetworkBackingInfo{
				OpaqueNetworkId: id, OpaqueNetworkType: "nsx.LogicalSwitch",
			}
			return nil
		}
	}
	return fmt.Errorf("%s has no card", vmID)
}

// SetMode of the disk of a VM at this place, from 0: persistent, independent_persistent.
func SetMode(vmID string, place int, mode string) error {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	for _, device := range vm.Config.Hardware.Device {
		if disk, ok := device.(*types.VirtualDisk); ok {
			if place--; place < 0 {
				disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo).DiskMode = mode
				return nil
			}
		}
	}
	return fmt.Errorf("%s has no such disk", vmID)
}

// AddDisk gives a VM another disk, beside its first one.
func AddDisk(vmID string) error {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	devices := object.VirtualDeviceList(vm.Config.Hardware.Device)
	controller, err := devices.FindDiskController("")
	if err != nil {
		return err
	}
	store := Map.Get(vm.Datastore[0]).(*Datastore)
	disk := devices.CreateDisk(controller, store.Self, "")
	disk.CapacityInKB = 1024
	change := &types.VirtualDeviceConfigSpec{
		Operation:     types.VirtualDeviceConfigSpecOperationAdd,
		FileOperation: types.VirtualDeviceConfigSpecFileOperationCreate,
		Device:        disk,
	}
	spec := types.VirtualMachineConfigSpec{DeviceChange: []types.BaseVirtualDeviceConfigSpec{change}}
	if fault := vm.configureDevices(&spec); fault != nil {
		return fmt.Errorf("%T", fault)
	}
	return nil
}

// SetDisk gives the disk of a VM at this place, from 0, so many bytes of zeros.
func SetDisk(vmName string, place int, size int64) (string, error) {
	for _, o := range Map.All("VirtualMachine") {
		vm := o.(*VirtualMachine)
		if vm.Name != vmName && vm.Self.Value != vmName {
			continue
		}
		for _, device := range vm.Config.Hardware.Device {
			if disk, ok := device.(*types.VirtualDisk); ok {
				if place--; place >= 0 {
					continue
				}
				disk.CapacityInBytes, disk.CapacityInKB = size, size/1024
				vm.Capability.ChangeTrackingSupported = types.NewBool(true)
				file := hostPath(disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo).FileName)
				base := strings.TrimSuffix(file, ".vmdk")
				describe(base, size)
				Tracker.disks = append(Tracker.disks, base+"-flat.vmdk")
				_ = os.Link(base+"-flat.vmdk", base+"-flat.vmdk.kept")
				if err := os.Truncate(base+"-flat.vmdk", 0); err != nil {
					return "", err
				}
				return base + "-flat.vmdk", os.Truncate(base+"-flat.vmdk", size)
			}
		}
	}
	return "", fmt.Errorf("no VM %s with a disk", vmName)
}

// GuestWrites is what the guest of a running VM does; false when the VM is off. No snapshot is taken in the middle of it.
func GuestWrites(vmID string, offset int64, data []byte) (bool, error) {
	vm := Map.Get(types.ManagedObjectReference{Type: "VirtualMachine", Value: vmID}).(*VirtualMachine)
	written, err := false, error(nil)
	Map.WithLock(vm, func() {
		if vm.Runtime.PowerState != types.VirtualMachinePowerStatePoweredOn {
			return
		}
		for _, device := range vm.Config.Hardware.Device {
			if disk, ok := device.(*types.VirtualDisk); ok {
				name := hostPath(disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo).FileName)
				var file *os.File
				if file, err = os.OpenFile(strings.TrimSuffix(name, ".vmdk")+"-flat.vmdk", os.O_WRONLY, 0); err != nil {
					return
				}
				defer file.Close()
				_, err = file.WriteAt(data, offset)
				written = err == nil
				return
			}
		}
	})
	return written, err
}

// TrackedNames are the VMs that are set to be tracked, and the files that their hosts keep for it.
func TrackedNames() []string {
	names := []string{}
	for _, o := range Map.All("VirtualMachine") {
		vm := o.(*VirtualMachine)
		if vm.Config.ChangeTrackingEnabled != nil && *vm.Config.ChangeTrackingEnabled {
			names = append(names, vm.Self.Value)
		}
		for _, device := range vm.Config.Hardware.Device {
			if disk, ok := device.(*types.VirtualDisk); ok {
				if backing, ok := disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo); ok {
					ctk := strings.TrimSuffix(backing.FileName, ".vmdk") + "-ctk.vmdk"
					if _, err := os.Stat(hostPath(ctk)); err == nil {
						names = append(names, ctk)
					}
				}
			}
		}
	}
	return names
}

// SnapshotNames of all that are there, on any VM.
func SnapshotNames() []string {
	names := []string{}
	var walk func([]types.VirtualMachineSnapshotTree)
	walk = func(trees []types.VirtualMachineSnapshotTree) {
		for _, tree := range trees {
			names = append(names, tree.Name)
			walk(tree.ChildSnapshotList)
		}
	}
	for _, o := range Map.All("VirtualMachine") {
		if vm := o.(*VirtualMachine); vm.Snapshot != nil {
			walk(vm.Snapshot.RootSnapshotList)
		}
	}
	return names
}

// FailedTask is a task that has ended with this fault.
func FailedTask(entity types.ManagedObjectReference, name string, fault types.BaseMethodFault) types.ManagedObjectReference {
	task := CreateTask(entity, name, func(*Task) (types.AnyType, types.BaseMethodFault) { return nil, fault })
	return task.Run()
}

func SessionIsGood(key string) bool {
	_, ok := Map.SessionManager().getSession(key)
	return ok
}

func SessionCount() int {
	sessionMutex.Lock()
	defer sessionMutex.Unlock()
	return len(Map.SessionManager().sessions)
}

func EndSessions() {
	sessionMutex.Lock()
	defer sessionMutex.Unlock()
	m := Map.SessionManager()
	for key := range m.sessions {
		delete(m.sessions, key)
	}
}

// ForgetTasks: a vCenter that was restarted knows those no more.
func ForgetTasks() {
	Map.m.Lock()
	gone := []types.ManagedObjectReference{}
	for ref := range Map.objects {
		if ref.Type == "Task" {
			gone = append(gone, ref)
		}
	}
	Map.m.Unlock()
	for _, ref := range gone {
		Map.Remove(ref)
	}
}

// Each has bytes of a disk, where `fileName` names its descriptor; or, the last one, what of it has changed.
var extents = []string{"-flat.vmdk", "-delta.vmdk", "-sesparse.vmdk", "-ctk.vmdk"}

// Locked is a disk's file that a running VM writes to: the newest of each disk, unless a snapshot holds it. Descriptors are not,
// nor is what lies below: those are open for reading alone, and others may read them too (VMware KB 10051,
// «Investigating virtual machine file locks on ESXi hosts»: exclusive and read-only locks).
func Locked(store string, path string) bool {
	asked := fmt.Sprintf("[%s] %s", store, path)
	locked := false
	for _, o := range Map.All("VirtualMachine") {
		vm := o.(*VirtualMachine)
		if vm.Runtime.PowerState == types.VirtualMachinePowerStatePoweredOn {
			locked = locked || writes(vm.Config.Hardware.Device, asked)
		}
	}
	Tracker.Lock()
	defer Tracker.Unlock()
	for id := range Tracker.frozen {
		snapshot, ok := Map.Get(types.ManagedObjectReference{Type: "VirtualMachineSnapshot", Value: id}).(*VirtualMachineSnapshot)
		if ok && writes(snapshot.Config.Hardware.Device, asked) {
			return false
		}
	}
	return locked
}

// Is it a file of the newest layer of one of the disks?
func writes(devices []types.BaseVirtualDevice, asked string) bool {
	for _, device := range devices {
		if disk, ok := device.(*types.VirtualDisk); ok {
			if backing, ok := disk.Backing.(*types.VirtualDiskFlatVer2BackingInfo); ok {
				for _, end := range extents {
					if strings.TrimSuffix(backing.FileName, ".vmdk")+end == asked {
						return true
					}
				}
			}
		}
	}
	return false
}

// HostIDs of all hosts, in order.
func HostIDs() []string {
	ids := []string{}
	for _, o := range Map.All("HostSystem") {
		ids = append(ids, o.Reference().Value)
	}
	sort.Strings(ids)
	return ids
}

// NameHost as vCenter knows it, with the SHA-1 of its certificate.
func NameHost(id string, name string, thumbprint string) {
	host := Map.Get(types.ManagedObjectReference{Type: "HostSystem", Value: id}).(*HostSystem)
	host.Name, host.Summary.Config.Name, host.Summary.Config.SslThumbprint = name, name, thumbprint
}

// MountEverywhere each datastore, as shared storage is; the simulator says of each only the host that it was made on.
func MountEverywhere() {
	for _, o := range Map.All("Datastore") {
		mounts := []types.DatastoreHostMount{}
		for _, id := range HostIDs() {
			mounts = append(mounts, types.DatastoreHostMount{
				Key:       types.ManagedObjectReference{Type: "HostSystem", Value: id},
				MountInfo: types.HostMountInfo{AccessMode: "readWrite", Mounted: types.NewBool(true), Accessible: types.NewBool(true)},
			})
		}
		o.(*Datastore).Host = mounts
	}
}

// HostOfFile is the host of the VM in whose folder the file lies.
func HostOfFile(store string, path string) string {
	folder := fmt.Sprintf("[%s] %s/", store, strings.Split(path, "/")[0])
	for _, o := range Map.All("VirtualMachine") {
		if vm := o.(*VirtualMachine); strings.HasPrefix(vm.Config.Files.VmPathName, folder) {
			return vm.Runtime.Host.Value
		}
	}
	return HostIDs()[0]
}

// ConsolidateVMDisksTask: nothing is ever left to consolidate here.
func (vm *VirtualMachine) ConsolidateVMDisksTask(req *types.ConsolidateVMDisks_Task) soap.HasFault {
	task := CreateTask(vm, "consolidateVMDisks", func(*Task) (types.AnyType, types.BaseMethodFault) {
		vm.Runtime.ConsolidationNeeded = types.NewBool(false)
		return nil, nil
	})
	return &methods.ConsolidateVMDisks_TaskBody{Res: &types.ConsolidateVMDisks_TaskResponse{Returnval: task.Run()}}
}

// QueryChangedDiskAreas compares two frozen copies, block by block; at most areasMax areas an answer.
func (vm *VirtualMachine) QueryChangedDiskAreas(req *types.QueryChangedDiskAreas) soap.HasFault {
	body := &methods.QueryChangedDiskAreasBody{}
	t := Tracker
	t.Lock()
	defer t.Unlock()
	invalid := func(property string) soap.HasFault {
		body.Fault_ = Fault("A specified parameter was not correct: "+property, &types.InvalidArgument{InvalidProperty: property})
		return body
	}
	if req.Snapshot == nil || t.frozen[req.Snapshot.Value] == nil {
		return invalid("snapshot")
	}
	to, ok := t.frozen[req.Snapshot.Value][req.DeviceKey]
	if !ok {
		return invalid("deviceKey")
	}
	present, err := os.ReadFile(to)
	size := int64(len(present))
	if err != nil || req.StartOffset >= size {
		return invalid("startOffset")
	}
	var before []byte
	if req.ChangeId != "*" {
		slash := strings.LastIndex(req.ChangeId, "/")
		if slash < 0 {
			return invalid("changeId")
		}
		if _, err := strconv.Atoi(req.ChangeId[slash+1:]); err != nil {
			return invalid("changeId")
		}
		from, ok := t.known[fmt.Sprintf("%s/%d/%s", vm.Self.Value, req.DeviceKey, req.ChangeId)]
		epoch := fmt.Sprintf("52 de ad be ef 00 00 %02x-", t.epoch[vm.Self.Value])
		if !ok || !strings.HasPrefix(req.ChangeId, epoch) {
			body.Fault_ = Fault("Error caused by file "+filepath.Base(to), &types.FileFault{File: filepath.Base(to)})
			return body
		}
		before, _ = os.ReadFile(from)
	}
	info := types.DiskChangeInfo{StartOffset: req.StartOffset, Length: size - req.StartOffset}
	if t.Lies && req.ChangeId == "*" {
		body.Res = &types.QueryChangedDiskAreasResponse{Returnval: info}
		return body
	}
	zeros := make([]byte, trackedBytes)
	for at := req.StartOffset; at < size; at += trackedBytes {
		end := at + trackedBytes
		if end > size {
			end = size
		}
		old := zeros[:end-at]
		if int64(len(before)) >= end {
			old = before[at:end]
		}
		if bytes.Equal(present[at:end], old) {
			continue
		}
		last := len(info.ChangedArea) - 1
		if last >= 0 && info.ChangedArea[last].Start+info.ChangedArea[last].Length == at {
			info.ChangedArea[last].Length += end - at
			continue
		}
		if len(info.ChangedArea) == areasMax {
			info.Length = at - req.StartOffset
			break
		}
		info.ChangedArea = append(info.ChangedArea, types.DiskChangeExtent{Start: at, Length: end - at})
	}
	body.Res = &types.QueryChangedDiskAreasResponse{Returnval: info}
	return body
}
