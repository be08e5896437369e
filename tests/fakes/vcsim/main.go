// vCenter as govmomi simulates it, behind a door of our own that keeps what the real one keeps and can be told to fail.
//
//   https  -l          /sdk, /folder and /nfc as vCenter serves them; /folder wants a session's cookie, and so does every SOAP call
//                      but the few that come before a login
//   http   (printed)   the tests' own: /disk /allocate /nvram /another /opaque /mode /unconsolidated /lie /silent /lay /write /reset /tools /sessions /fault /state /certificate /leases /store
//                      and those of hosts.go
//
// It prints one line of JSON once both listen: {"url": …, "control": …, "fingerprint": …}. It ends with its standard input.

package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/ioutil"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/types"
)

// A call that fails `Times` times from now on. `Method` is SOAP's, or "folder"; `Match` must be in its body (or path).
type fault struct {
	Method string
	Match  string
	// A SOAP fault's type; "task:TYPE": the call succeeds, and its task fails with it; "cut": the answer breaks off in the
	// middle; "refuse": the connection is closed at once; "status:503": that answer;
	// "deny:PRIVILEGE,PRIVILEGE": our user lacks them; "hang:MS": no answer for so long; "html": a page of some other server;
	// "ignored": the call is answered, and nothing is done;
	// of nfc, "empty": an answer that ends before a disk has begun.
	Kind  string
	Times int
}

type door struct {
	sync.Mutex
	mux         http.Handler
	faults      []fault
	calls       map[string]int
	certificate tls.Certificate
	fingerprint string
	thumbprint  string

	room                  room
	hosts                 map[string]*esxi
	stranger              *esxi
	redirect              string
	port                  int
	tickets               map[string]bool
	resetUntil, busyUntil time.Time
	versions              []string
}

var before = map[string]bool{"RetrieveServiceContent": true, "Login": true, "Logout": true}
var method = regexp.MustCompile(`<(?:\w+:)?Body[^>]*>\s*<(?:\w+:)?(\w+)`)
var entity = regexp.MustCompile(`<(?:\w+:)?_this[^>]*?\stype="(\w+)"[^>]*>([^<]+)<`)

func (d *door) strike(name, body string) string {
	d.Lock()
	defer d.Unlock()
	d.calls[name]++
	for i := range d.faults {
		f := &d.faults[i]
		if f.Times > 0 && f.Method == name && strings.Contains(body, f.Match) {
			f.Times--
			return f.Kind
		}
	}
	return ""
}

func (d *door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if d.notUp(w) {
		return
	}
	key := ""
	if cookie, err := r.Cookie("vmware_soap_session"); err == nil {
		key = strings.Trim(cookie.Value, `"`)
	}
	good := simulator.SessionIsGood(key)
	if strings.HasPrefix(r.URL.Path, "/folder") {
		if d.room.enter(w) {
			defer d.room.leave()
			d.folder(w, r, good)
		}
		return
	}
	if strings.HasPrefix(r.URL.Path, "/nfc/") {
		if d.room.enter(w) {
			defer d.room.leave()
			d.export(w, r)
		}
		return
	}
	if r.URL.Path == "/sdk/vimServiceVersions.xml" && len(d.versions) > 0 {
		d.listVersions(w)
		return
	}
	body, _ := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(body))
	name := ""
	if found := method.FindSubmatch(body); found != nil {
		name = string(found[1])
	}
	kind := d.strike(name, string(body))
	switch {
	case kind == "refuse":
		hangUp(w)
	case strings.HasPrefix(kind, "status:"):
		code, _ := strconv.Atoi(kind[7:])
		w.WriteHeader(code)
	case strings.HasPrefix(kind, "hang:"):
		ms, _ := strconv.Atoi(kind[5:])
		select {
		case <-r.Context().Done():
		case <-time.After(time.Duration(ms) * time.Millisecond):
		}
		hangUp(w)
	// The simulator destroys a collector with that one's lock, and waits for its manager's; an event that is posted meanwhile, as by
	// each log-in, has the manager's and waits for the collector's. Then no log-in is answered any more.
	case kind == "ignored", name == "DestroyCollector":
		answer(w, 200, fmt.Sprintf(`<%sResponse xmlns="urn:vim25"></%sResponse>`, name, name))
	case kind == "html":
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>")
	case strings.HasPrefix(kind, "task:"):
		found := entity.FindSubmatch(body)
		ref := types.ManagedObjectReference{Type: string(found[1]), Value: string(found[2])}
		task := simulator.FailedTask(ref, name, &types.SnapshotFault{})
		if kind == "task:SystemError" {
			task = simulator.FailedTask(ref, name, &types.SystemError{Reason: "a fault of the tests"})
		}
		answer(w, 200, fmt.Sprintf(`<%sResponse xmlns="urn:vim25"><returnval type="Task">%s</returnval></%sResponse>`, name, task.Value, name))
	case strings.HasPrefix(kind, "deny:"):
		said := httptest.NewRecorder()
		d.mux.ServeHTTP(said, r)
		told := said.Body.String()
		for _, privilege := range strings.Split(kind[5:], ",") {
			held := "<privId>" + privilege + "</privId><isGranted>"
			told = strings.ReplaceAll(told, held+"true", held+"false")
		}
		w.WriteHeader(said.Code)
		_, _ = io.WriteString(w, told)
	case kind != "":
		soapFault(w, kind)
	case !d.speaks(r.Header.Get("SOAPAction")):
		soapFault(w, "InvalidRequest")
	case r.URL.Path == "/sdk" && name != "" && !before[name] && !good:
		soapFault(w, "NotAuthenticated")
	case name == "AcquireGenericServiceTicket":
		d.giveTicket(w, string(body))
	default:
		d.mux.ServeHTTP(w, r)
	}
}

func (d *door) folder(w http.ResponseWriter, r *http.Request, good bool) {
	kind := d.strike("folder", r.URL.Path)
	switch {
	case kind == "refuse":
		hangUp(w)
	case strings.HasPrefix(kind, "status:"):
		code, _ := strconv.Atoi(kind[7:])
		w.WriteHeader(code)
	case !good:
		w.Header().Set("WWW-Authenticate", `Basic realm="VMware HTTP server"`)
		w.WriteHeader(401)
	case d.redirect != "":
		d.sendOn(w, r)
	case kind == "cut":
		d.mux.ServeHTTP(&cutter{w, 1000}, r)
	default:
		d.file(w, r)
	}
}

// A file that a running VM writes to is its host's alone: whoever asks vCenter for it is answered 500, and no word more.
func (d *door) file(w http.ResponseWriter, r *http.Request) {
	if simulator.Locked(r.URL.Query().Get("dsName"), strings.TrimPrefix(r.URL.Path, "/folder/")) {
		w.WriteHeader(500)
		return
	}
	d.mux.ServeHTTP(w, r)
}

// An exported disk, as a host sends it: in chunks of unknown number, whatever range was asked for, while its lease lives.
func (d *door) export(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/")
	secret := parts[2]
	kind := d.strike("nfc", r.URL.Path)
	content, err := ioutil.ReadFile(simulator.Exports.File(secret, parts[len(parts)-1]))
	switch {
	case kind == "refuse":
		hangUp(w)
		return
	case strings.HasPrefix(kind, "status:"):
		code, _ := strconv.Atoi(kind[7:])
		w.WriteHeader(code)
		return
	case err != nil:
		w.WriteHeader(404)
		return
	}
	w.Header().Set("Content-Type", "application/x-vnd.vmware-streamVmdk")
	if kind == "empty" {
		return
	}
	if kind == "page" { // as a proxy in between answers, with a status that says all is well
		_, _ = io.WriteString(w, strings.Repeat("<html><body>Please log in</body></html>\n", 100))
		return
	}
	half := len(content) / 2
	_, _ = w.Write(content[:half])
	w.(http.Flusher).Flush()
	if kind == "cut" {
		hangUp(w)
		return
	}
	// "hold": until it was renewed three times; "starve": until it is dead.
	for kind != "" && simulator.Exports.Renewals(secret) >= 0 {
		if kind == "hold" && simulator.Exports.Renewals(secret) >= 3 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if simulator.Exports.Renewals(secret) < 0 {
		hangUp(w)
		return
	}
	_, _ = w.Write(content[half:])
}

func hangUp(w http.ResponseWriter) {
	connection, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		_ = connection.Close()
	}
}

// An answer that ends after so many bytes, whatever its Content-Length said.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) < c.left {
		c.left -= len(p)
		return c.ResponseWriter.Write(p)
	}
	_, _ = c.ResponseWriter.Write(p[:c.left])
	c.ResponseWriter.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/xml; charset=utf-8")
	w.WriteHeader(status)
	fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xmlns:xsd="http://www.w3.org/2001/XMLSchema"><soapenv:Body>%s</soapenv:Body></soapenv:Envelope>`, body)
}

func soapFault(w http.ResponseWriter, kind string) {
	inner := ""
	if kind == "NotAuthenticated" || kind == "NoPermission" {
		inner = `<object type="Folder">group-d1</object><privilegeId>VirtualMachine.State.CreateSnapshot</privilegeId>`
	}
	answer(w, 500, fmt.Sprintf(`<soapenv:Fault><faultcode>ServerFaultCode</faultcode><faultstring>a fault of the tests: %s</faultstring><detail><%sFault xmlns="urn:vim25" xsi:type="%s">%s</%sFault></detail></soapenv:Fault>`, kind, kind, kind, inner, kind))
}

// A certificate for an address, with its fingerprints by SHA-256 and, with colons, by SHA-1.
func certificateOf(address string) (tls.Certificate, string, string) {
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
	made := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "vcenter.test"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		IPAddresses:  []net.IP{net.ParseIP(address)},
	}
	der, err := x509.CreateCertificate(rand.Reader, made, made, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	thumbprint := strings.ReplaceAll(fmt.Sprintf("% X", sha1.Sum(der)), " ", ":")
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, fmt.Sprintf("%X", sha256.Sum256(der)), thumbprint
}

func (d *door) newCertificate() {
	certificate, fingerprint, thumbprint := certificateOf("127.0.0.1")
	d.Lock()
	defer d.Unlock()
	d.certificate, d.fingerprint, d.thumbprint = certificate, fingerprint, thumbprint
}

func (d *door) control(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	number := func(name string) int64 {
		n, _ := strconv.ParseInt(q.Get(name), 10, 64)
		return n
	}
	var out interface{} = "done"
	var err error
	switch r.URL.Path {
	case "/disk":
		out, err = simulator.SetDisk(q.Get("vm"), int(number("place")), number("bytes"))
	case "/lay":
		err = simulator.LayOver(q.Get("vm"), q.Get("file"))
	case "/lie":
		simulator.Tracker.Lock()
		simulator.Tracker.Lies = true
		simulator.Tracker.Unlock()
	case "/silent":
		simulator.Tracker.Lock()
		simulator.Tracker.Silent = true
		simulator.Tracker.Unlock()
	case "/unconsolidated":
		simulator.LeaveToConsolidate(q.Get("vm"))
	case "/mode":
		err = simulator.SetMode(q.Get("vm"), int(number("place")), q.Get("mode"))
	case "/allocate":
		simulator.Allocate(q.Get("vm"), number("bytes"))
	case "/nvram":
		out, err = simulator.KeepVariables(q.Get("vm"), q.Get("secure") == "true")
	case "/opaque":
		err = simulator.PlugIntoOpaque(q.Get("vm"), q.Get("id"), q.Get("name"))
	case "/another":
		err = simulator.AddDisk(q.Get("vm"))
	case "/reset":
		simulator.Tracker.Reset(q.Get("vm"))
	case "/write":
		body, _ := io.ReadAll(r.Body)
		out, err = simulator.GuestWrites(q.Get("vm"), number("offset"), body)
	case "/tools":
		simulator.RunTools(q.Get("vm"))
	case "/sessions":
		simulator.EndSessions()
	case "/leases":
		simulator.Exports.Lock()
		simulator.Exports.Timeout = time.Duration(number("timeout_ms")) * time.Millisecond
		simulator.Exports.Stuck = int(number("stuck"))
		simulator.Exports.Unlock()
	case "/hosts":
		out = d.openHosts()
	case "/redirect":
		d.Lock()
		d.redirect = q.Get("to")
		d.Unlock()
	case "/limit":
		d.limit(int(number("most")), q.Get("how"), q.Get("meet") != "")
	case "/restart":
		d.restart(time.Duration(number("ms")) * time.Millisecond)
	case "/versions":
		d.versions = strings.Split(q.Get("list"), ",")
	case "/store":
		err = simulator.SetStoreType(q.Get("type"))
	case "/certificate":
		d.newCertificate()
		out = d.fingerprint
	case "/fault":
		d.Lock()
		d.faults = append(d.faults, fault{q.Get("method"), q.Get("match"), q.Get("kind"), int(number("times"))})
		d.Unlock()
	case "/nofaults":
		d.Lock()
		d.faults = nil
		d.Unlock()
	case "/state":
		d.Lock()
		calls := map[string]int{}
		for name, count := range d.calls {
			calls[name] = count
		}
		hosts := map[string]interface{}{}
		for id, h := range d.hosts {
			hosts[id] = h.state()
		}
		if d.stranger != nil {
			hosts["stranger"] = d.stranger.state()
		}
		d.Unlock()
		d.room.Lock()
		hosts["vcenter"] = map[string]interface{}{"most": d.room.most, "refused": d.room.refused}
		d.room.Unlock()
		out = map[string]interface{}{"hosts": hosts, "snapshots": simulator.SnapshotNames(), "tracked": simulator.TrackedNames(), "sessions": simulator.SessionCount(), "leases": simulator.Exports.Count(), "calls": calls}
	default:
		err = fmt.Errorf("nothing is served at %s", r.URL.Path)
	}
	if err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	_ = json.NewEncoder(w).Encode(out)
}

// Each network card has an address of its own: the model gives all VMs of a pool the same card.
func addresses() {
	for i, entity := range simulator.Map.All("VirtualMachine") {
		hardware := &entity.(*simulator.VirtualMachine).Config.Hardware
		hardware.Device = append([]types.BaseVirtualDevice{}, hardware.Device...)
		for n, device := range hardware.Device {
			if card, ok := device.(*types.VirtualE1000); ok {
				own := *card
				own.MacAddress = fmt.Sprintf("00:50:56:00:%02x:%02x", i>>8, i&255)
				hardware.Device[n] = &own
			}
		}
	}
}

func main() {
	machines := flag.Int("vms", 1, "how many VMs in each of the two resource pools")
	user := flag.String("user", "administrator@vsphere.local", "")
	password := flag.String("password", "s3cret", "")
	folder := flag.String("folder", "", "where datastores and frozen disks lie")
	flag.Parse()
	log.SetOutput(io.Discard)
	_ = os.Setenv("TMPDIR", *folder)

	model := simulator.VPX()
	model.Machine = *machines
	if err := model.Create(); err != nil {
		panic(err)
	}
	addresses()
	simulator.Map.AddHandler(simulator.Tracker)
	model.Service.Listen = &url.URL{Host: "127.0.0.1:0", User: url.UserPassword(*user, *password)}
	inner := model.Service.NewServer()
	defer inner.Close()

	d := &door{mux: model.Service.ServeMux, calls: map[string]int{}, hosts: map[string]*esxi{}, tickets: map[string]bool{}}
	d.newCertificate()
	simulator.Exports.Thumbprint = func() string {
		d.Lock()
		defer d.Unlock()
		return d.thumbprint
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	config := &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		d.Lock()
		defer d.Unlock()
		c := d.certificate
		return &c, nil
	}}
	quiet := log.New(io.Discard, "", 0)
	go (&http.Server{Handler: d, ErrorLog: quiet}).Serve(tls.NewListener(resetting{plain, d}, config))
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go http.Serve(control, http.HandlerFunc(d.control))
	_ = json.NewEncoder(os.Stdout).Encode(map[string]string{
		"url":         "https://" + plain.Addr().String(),
		"control":     "http://" + control.Addr().String(),
		"fingerprint": d.fingerprint,
	})
	_, _ = io.Copy(io.Discard, os.Stdin)
	model.Remove()
}
