// The ESXi hosts behind our vCenter, each at an address and with a certificate of its own, and what a real site has besides:
//
//   /hosts      from now on every host of the inventory listens (its name is its address), and leases name the host of their VM
//   /redirect   vCenter's /folder sends readers on: to the VM's "host", to a "stranger", by "plain" HTTP, round in a "loop"
//   /limit      so many transfers at once of vCenter and of each host; beyond, "503" or "reset". With `meet` a transfer
//               waits until another was refused, 10 s at the most: those of a test's small disks seldom meet
//   /restart    vCenter's services restart: sessions, tasks and leases are gone, connections are reset, then 503, then all is well
//   /versions   the API versions that vimServiceVersions.xml lists; a request in any other is refused
//
// Sources. Limits: «Virtual Disk Development Kit Programming Guide», NFC Session Limits and Timeouts (52 connections through
// vCenter; 48 MB of buffers a host); how HTTP is answered beyond is documented nowhere, so both answers are played. Versions:
// «vSphere Web Services SDK Programming Guide», and pyvmomi's SmartConnect. A lease that names its host: HttpNfcLeaseDeviceUrl.
// A redirect of /folder is documented nowhere: RFC 9110, section 15.4, is what is played, with a ticket in its URL that is good
// once, as a generic service ticket is (SessionManager.AcquireGenericServiceTicket). Such a ticket, for the URL of a host's own
// /folder, is shown as the cookie vmware_cgi_ticket: that is how govmomi's Datastore.ServiceTicket uses it.

package main

import (
	"crypto/tls"
	"encoding/xml"
	"fmt"
	"html"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/vmware/govmomi/simulator"
)

// Transfers at once; none is refused while `limit` is 0.
type room struct {
	sync.Mutex
	now, most, limit, refused int
	how                       string
	meet                      bool
}

func (r *room) enter(w http.ResponseWriter) bool {
	r.Lock()
	if r.limit > 0 && r.now >= r.limit {
		r.refused++
		how := r.how
		r.Unlock()
		if how == "reset" {
			hangUp(w)
		} else {
			w.WriteHeader(503)
		}
		return false
	}
	r.now++
	if r.now > r.most {
		r.most = r.now
	}
	limited, meet := r.limit > 0, r.meet
	r.Unlock()
	if limited {
		time.Sleep(20 * time.Millisecond) // else transfers of a test's small disk seldom meet
	}
	for tries := 0; meet && tries < 500; tries++ {
		r.Lock()
		meet = r.refused == 0
		r.Unlock()
		time.Sleep(20 * time.Millisecond)
	}
	return true
}

func (r *room) leave() {
	r.Lock()
	r.now--
	r.Unlock()
}

type esxi struct {
	door       *door
	name, at   string
	thumbprint string
	room       room
	sync.Mutex
	served int
	// What it was shown of secrets that are vCenter's alone: cookies, passwords.
	shown []string
}

func (h *esxi) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	h.Lock()
	for _, name := range []string{"Cookie", "Authorization"} {
		if told := r.Header.Get(name); told != "" && !strings.HasPrefix(told, "vmware_cgi_ticket=") {
			h.shown = append(h.shown, name)
		}
	}
	if strings.Contains(string(body), "<password>") {
		h.shown = append(h.shown, "password")
	}
	h.served++
	h.Unlock()
	if !h.room.enter(w) {
		return
	}
	defer h.room.leave()
	switch {
	case strings.HasPrefix(r.URL.Path, "/nfc/"):
		h.door.export(w, r)
	case strings.HasPrefix(r.URL.Path, "/folder/") && h.door.ticket(r.URL.Query().Get("ticket")):
		h.door.file(w, r)
	case strings.HasPrefix(r.URL.Path, "/folder/") && h.door.bought(r):
		switch kind := h.door.strike("esxi", r.URL.Path); kind {
		case "":
			h.door.file(w, r)
		case "refuse":
			hangUp(w)
		default:
			code, _ := strconv.Atoi(strings.TrimPrefix(kind, "status:"))
			w.WriteHeader(code)
		}
	default:
		w.WriteHeader(401)
	}
}

func (h *esxi) state() map[string]interface{} {
	h.Lock()
	defer h.Unlock()
	h.room.Lock()
	defer h.room.Unlock()
	return map[string]interface{}{"at": h.at, "served": h.served, "shown": append([]string{}, h.shown...), "most": h.room.most, "refused": h.room.refused}
}

// A host that listens; at 127.0.0.`number`, which is its name.
func (d *door) listen(number int) *esxi {
	address := fmt.Sprintf("127.0.0.%d", number)
	plain, err := net.Listen("tcp", fmt.Sprintf("%s:%d", address, d.port))
	if err != nil {
		panic(err)
	}
	certificate, _, thumbprint := certificateOf(address)
	// All hosts of a site listen at one port.
	d.port = plain.Addr().(*net.TCPAddr).Port
	h := &esxi{door: d, name: address, at: plain.Addr().String(), thumbprint: thumbprint}
	server := &http.Server{Handler: h, ErrorLog: log.New(io.Discard, "", 0)}
	go server.Serve(tls.NewListener(plain, &tls.Config{Certificates: []tls.Certificate{certificate}}))
	return h
}

func (d *door) openHosts() map[string]string {
	d.Lock()
	defer d.Unlock()
	names := map[string]string{}
	for i, id := range simulator.HostIDs() {
		h := d.listen(10 + i)
		d.hosts[id] = h
		simulator.NameHost(id, h.name, h.thumbprint)
		names[id] = h.name
	}
	simulator.MountEverywhere()
	d.stranger = d.listen(250)
	simulator.Exports.Where = func(host string) (string, string) {
		d.Lock()
		defer d.Unlock()
		return d.hosts[host].at, d.hosts[host].thumbprint
	}
	return names
}

var asked = regexp.MustCompile(`<url>([^<]+)</url>`)

// A ticket for one request to a URL of a host's.
func (d *door) giveTicket(w http.ResponseWriter, body string) {
	found := asked.FindStringSubmatch(body)
	if found == nil || !strings.Contains(body, "<method>httpGet</method>") {
		soapFault(w, "InvalidArgument")
		return
	}
	wanted := html.UnescapeString(found[1])
	id := uuid.New().String()
	d.Lock()
	d.tickets[id+" "+wanted] = true
	d.Unlock()
	to, _ := url.Parse(wanted)
	answer(w, 200, fmt.Sprintf(`<AcquireGenericServiceTicketResponse xmlns="urn:vim25"><returnval><id>%s</id><hostName>%s</hostName>`+
		`</returnval></AcquireGenericServiceTicketResponse>`, id, to.Hostname()))
}

// Was a ticket given for this very request? The datastores of the simulator are found by their datacenter, which a host has
// not got: its own is put in.
func (d *door) bought(r *http.Request) bool {
	cookie, err := r.Cookie("vmware_cgi_ticket")
	if err != nil || r.Method != "GET" || !d.ticket(cookie.Value+" https://"+r.Host+r.URL.RequestURI()) {
		return false
	}
	query := r.URL.Query()
	query.Set("dcPath", "DC0")
	r.URL.RawQuery = query.Encode()
	return true
}

// Is the ticket good? It is so once.
func (d *door) ticket(id string) bool {
	d.Lock()
	defer d.Unlock()
	good := d.tickets[id]
	delete(d.tickets, id)
	return good
}

// vCenter sends the reader of a file on to a host.
func (d *door) sendOn(w http.ResponseWriter, r *http.Request) {
	where := url.URL{Scheme: "https", Path: r.URL.Path}
	query := r.URL.Query()
	d.Lock()
	switch d.redirect {
	case "host":
		id := uuid.New().String()
		d.tickets[id] = true
		query.Set("ticket", id)
		where.Host = d.hosts[simulator.HostOfFile(query.Get("dsName"), strings.TrimPrefix(r.URL.Path, "/folder/"))].at
	case "stranger":
		where.Host = d.stranger.at
	case "plain":
		where.Scheme, where.Host = "http", d.stranger.at
	case "loop":
		where.Host = r.Host
	}
	d.Unlock()
	where.RawQuery = query.Encode()
	w.Header().Set("Location", where.String())
	w.WriteHeader(http.StatusTemporaryRedirect)
}

func (d *door) limit(most int, how string, meet bool) {
	d.Lock()
	defer d.Unlock()
	rooms := []*room{&d.room}
	for _, h := range d.hosts {
		rooms = append(rooms, &h.room)
	}
	for _, r := range rooms {
		r.Lock()
		r.limit, r.how, r.meet, r.most, r.refused = most, how, meet, 0, 0
		r.Unlock()
	}
}

// Connections are reset for so long, and then answered 503, by the proxy that is up before what it is for. Reset and not refused:
// the port is to stay ours.
func (d *door) restart(lasts time.Duration) {
	d.Lock()
	d.resetUntil = time.Now().Add(lasts)
	d.busyUntil = d.resetUntil.Add(lasts)
	d.Unlock()
	simulator.EndSessions()
	simulator.ForgetTasks()
	simulator.Exports.EndAll()
}

// Is the request answered by a vCenter that is not up yet?
func (d *door) notUp(w http.ResponseWriter) bool {
	d.Lock()
	resets, busy := time.Now().Before(d.resetUntil), time.Now().Before(d.busyUntil)
	d.Unlock()
	switch {
	case resets:
		hangUp(w)
	case busy:
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(503)
		_, _ = io.WriteString(w, "503 Service Unavailable (Failed to connect to endpoint: /sdk)")
	}
	return busy
}

type resetting struct {
	net.Listener
	door *door
}

func (l resetting) Accept() (net.Conn, error) {
	for {
		connection, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.door.Lock()
		resets := time.Now().Before(l.door.resetUntil)
		l.door.Unlock()
		if !resets {
			return connection, nil
		}
		_ = connection.(*net.TCPConn).SetLinger(0)
		_ = connection.Close()
	}
}

var action = regexp.MustCompile(`^"?urn:vim25(?:/([^"]*))?"?$`)

// Does the platform speak the version that the request names? One without a version is of the first API, which all speak.
func (d *door) speaks(header string) bool {
	found := action.FindStringSubmatch(header)
	if len(d.versions) == 0 || found == nil || found[1] == "" {
		return true
	}
	for _, version := range d.versions {
		if version == found[1] {
			return true
		}
	}
	return false
}

type listed struct {
	XMLName   xml.Name `xml:"namespaces"`
	Version   string   `xml:"version,attr"`
	Namespace struct {
		Name    string   `xml:"name"`
		Version string   `xml:"version"`
		Prior   []string `xml:"priorVersions>version"`
	} `xml:"namespace"`
}

// The newest first. The other namespace that a vCenter lists is left out.
func (d *door) listVersions(w http.ResponseWriter) {
	out := listed{Version: "1.0"}
	out.Namespace.Name, out.Namespace.Version, out.Namespace.Prior = "urn:vim25", d.versions[0], d.versions[1:]
	w.Header().Set("Content-Type", "text/xml")
	_, _ = io.WriteString(w, xml.Header)
	_ = xml.NewEncoder(w).Encode(out)
}
