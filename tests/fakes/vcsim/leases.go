// Put into govmomi's package "simulator" beside tracking.go: ExportSnapshot and its lease, which that simulator lacks.
//
//   - initializing, then ready; or never ready
//   - dead when nobody says its progress for its timeout, when its session ends, when it is completed or aborted
//   - one at a time for a VM: the next one is told TaskInProgress
//   - its disks as stream-optimized VMDKs that qemu-img makes, with the end-of-stream marker that a host writes and qemu-img does not
//
// What it cannot prove: how a real host orders, compresses and paces its stream.

package simulator

import (
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

type exportLease struct {
	mo.HttpNfcLease
	vm       string
	secret   string
	files    map[string]string
	timeout  time.Duration
	renewed  time.Time
	renewals int
	over     bool
}

type exports struct {
	sync.Mutex
	// Of the leases made from now on.
	Timeout time.Duration
	// So many of them never become ready.
	Stuck int
	// Of the certificate that the URLs' host shows.
	Thumbprint func() string
	// Address and thumbprint of a host, by its id; nil: leases name none («*»), as a host that is asked itself.
	Where func(host string) (string, string)
	all   []*exportLease
}

var Exports = &exports{Timeout: 300 * time.Second}

// Under the lock.
func (l *exportLease) alive() bool {
	return !l.over && time.Since(l.renewed) < l.timeout
}

// Living leases.
func (e *exports) Count() int {
	e.Lock()
	defer e.Unlock()
	count := 0
	for _, lease := range e.all {
		if lease.alive() {
			count++
		}
	}
	return count
}

// EndAll leases, as a restart does.
func (e *exports) EndAll() {
	e.Lock()
	defer e.Unlock()
	for _, lease := range e.all {
		lease.over = true
	}
}

// File behind a URL; empty where there is no such lease, or no such file, any more.
func (e *exports) File(secret, name string) string {
	e.Lock()
	defer e.Unlock()
	for _, lease := range e.all {
		if lease.secret == secret && lease.alive() {
			return lease.files[name]
		}
	}
	return ""
}

// Renewals of a lease so far; negative when it is dead.
func (e *exports) Renewals(secret string) int {
	e.Lock()
	defer e.Unlock()
	for _, lease := range e.all {
		if lease.secret == secret && lease.alive() {
			return lease.renewals
		}
	}
	return -1
}

func (s *VirtualMachineSnapshot) ExportSnapshot(ctx *Context, req *types.ExportSnapshot) soap.HasFault {
	body := &methods.ExportSnapshotBody{}
	Tracker.Lock()
	frozen := Tracker.frozen[s.Self.Value]
	Tracker.Unlock()
	e := Exports
	e.Lock()
	defer e.Unlock()
	for _, other := range e.all {
		if other.vm == s.Vm.Value && other.alive() {
			body.Fault_ = Fault("an export is under way", &types.TaskInProgress{Task: types.ManagedObjectReference{Type: "Task", Value: "task-export"}})
			return body
		}
	}
	lease := &exportLease{vm: s.Vm.Value, secret: uuid.New().String(), files: map[string]string{}, timeout: e.Timeout, renewed: time.Now()}
	lease.Self = types.ManagedObjectReference{Type: "HttpNfcLease", Value: fmt.Sprintf("session[%s]%s", ctx.Session.Key, uuid.New())}
	lease.State = types.HttpNfcLeaseStateInitializing
	info := &types.HttpNfcLeaseInfo{Lease: lease.Self, Entity: s.Vm, LeaseTimeout: int32((e.Timeout + time.Second - 1) / time.Second)}
	for _, device := range s.Config.Hardware.Device {
		disk, ok := device.(*types.VirtualDisk)
		if !ok || frozen[disk.Key] == "" {
			continue
		}
		name := fmt.Sprintf("disk-%d.vmdk", len(lease.files))
		stream := frozen[disk.Key] + "-" + lease.secret
		if err := exportDisk(frozen[disk.Key], stream); err != nil {
			body.Fault_ = Fault(err.Error(), &types.FileFault{File: name})
			return body
		}
		lease.files[name] = stream
		where, thumbprint := "*", e.Thumbprint()
		if e.Where != nil {
			where, thumbprint = e.Where(Map.Get(s.Vm).(*VirtualMachine).Runtime.Host.Value)
		}
		yes := true
		info.DeviceUrl = append(info.DeviceUrl, types.HttpNfcLeaseDeviceUrl{
			Key:           fmt.Sprintf("/%s/%s", s.Vm.Value, plugged(s.Config.Hardware.Device, disk)),
			ImportKey:     fmt.Sprintf("/%s/%s", s.Vm.Value, plugged(s.Config.Hardware.Device, disk)),
			Url:           fmt.Sprintf("https://%s/nfc/%s/%s", where, lease.secret, name),
			SslThumbprint: thumbprint,
			Disk:          &yes,
			TargetId:      name,
		})
	}
	e.all = append(e.all, lease)
	ctx.Session.Put(lease)
	if e.Stuck > 0 {
		e.Stuck--
	} else {
		time.AfterFunc(20*time.Millisecond, func() {
			Map.WithLock(lease, func() {
				lease.Info = info
				lease.State = types.HttpNfcLeaseStateReady
			})
		})
	}
	body.Res = &types.ExportSnapshotResponse{Returnval: lease.Self}
	return body
}

func exportDisk(from, to string) error {
	said, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", from, to).CombinedOutput()
	if err != nil {
		return fmt.Errorf("qemu-img: %v: %s", err, said)
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.Write(make([]byte, 512))
	return err
}

// ParaVirtualSCSIController0:1, as a host names a disk's place.
func plugged(devices []types.BaseVirtualDevice, disk *types.VirtualDisk) string {
	for _, device := range devices {
		if controller, ok := device.(types.BaseVirtualController); ok && device.GetVirtualDevice().Key == disk.ControllerKey {
			kind := reflect.TypeOf(device).Elem().Name()
			return fmt.Sprintf("%s%d:%d", kind, controller.GetVirtualController().BusNumber, *disk.UnitNumber)
		}
	}
	return ""
}

func (l *exportLease) end() bool {
	Exports.Lock()
	defer Exports.Unlock()
	good := l.alive()
	l.over = true
	for _, file := range l.files {
		_ = os.Remove(file)
	}
	return good
}

func (l *exportLease) HttpNfcLeaseProgress(ctx *Context, req *types.HttpNfcLeaseProgress) soap.HasFault {
	body := &methods.HttpNfcLeaseProgressBody{}
	Exports.Lock()
	defer Exports.Unlock()
	if !l.alive() {
		body.Fault_ = Fault("the lease ran out", &types.Timedout{})
		return body
	}
	l.renewed = time.Now()
	l.renewals++
	body.Res = &types.HttpNfcLeaseProgressResponse{}
	return body
}

func (l *exportLease) HttpNfcLeaseComplete(ctx *Context, req *types.HttpNfcLeaseComplete) soap.HasFault {
	body := &methods.HttpNfcLeaseCompleteBody{}
	if l.State != types.HttpNfcLeaseStateReady {
		body.Fault_ = Fault("the lease is not ready", &types.InvalidState{})
		return body
	}
	if !l.end() {
		body.Fault_ = Fault("the lease ran out", &types.Timedout{})
		return body
	}
	ctx.Session.Remove(req.This)
	body.Res = &types.HttpNfcLeaseCompleteResponse{}
	return body
}

func (l *exportLease) HttpNfcLeaseAbort(ctx *Context, req *types.HttpNfcLeaseAbort) soap.HasFault {
	l.end()
	ctx.Session.Remove(req.This)
	return &methods.HttpNfcLeaseAbortBody{Res: &types.HttpNfcLeaseAbortResponse{}}
}
