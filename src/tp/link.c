/* link.c - owns the sockets of the watch. */
#include "tp/link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int set_nonblocking(int file) {
  return fcntl(file, F_SETFL, fcntl(file, F_GETFL) | O_NONBLOCK);
}

/* The abstract name that follows from the token; returns the address's length. */
static socklen_t local_address(const oproj_link_door *door, struct sockaddr_un *out) {
  *out = (struct sockaddr_un){.sun_family = AF_UNIX};
  int length = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "oproj-%016llx",
                        (unsigned long long)door->token);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* ---- rank 0's door -------------------------------------------------------------------------- */

static void as_ipv6(const struct sockaddr *from, in_port_t port, struct sockaddr_in6 *out) {
  *out = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = port};
  if (from->sa_family == AF_INET6) {
    const struct sockaddr_in6 *v6 = (const void *)from;
    out->sin6_addr = v6->sin6_addr;
    return;
  }
  const struct sockaddr_in *v4 = (const void *)from;
  out->sin6_addr.s6_addr[10] = out->sin6_addr.s6_addr[11] = 0xff;
  memcpy(out->sin6_addr.s6_addr + 12, &v4->sin_addr, 4);
}

/* Addresses that another host may reach: of interfaces that are up, neither loopback nor bound to
 * one link. */
static oproj_status list_addresses(oproj_link_door *door, in_port_t port) {
  const int32_t most = sizeof door->at / sizeof door->at[0];
  struct ifaddrs *all;
  REQUIRE(getifaddrs(&all) == 0, OPROJ_ERR_COMM, "this host's interfaces: %s", strerror(errno));
  for (struct ifaddrs *i = all; i && door->count < most; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
    if (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) continue;
    struct sockaddr_in6 *address = &door->at[door->count].address;
    as_ipv6(i->ifa_addr, port, address);
    if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;
    snprintf(door->at[door->count].interface, sizeof door->at[0].interface, "%.15s", i->ifa_name);
    door->count++;
  }
  freeifaddrs(all);
  REQUIRE(door->count > 0, OPROJ_ERR_COMM, "this host has no interface that others can reach");
  return OPROJ_OK;
}

static oproj_status listen_over_tcp(oproj_link_door *door, int listener) {
  int both = 0;
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
  socklen_t length = sizeof any;
  setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
  REQUIRE(bind(listener, (struct sockaddr *)&any, sizeof any) == 0 &&
              getsockname(listener, (struct sockaddr *)&any, &length) == 0,
          OPROJ_ERR_COMM, "no TCP port for the other hosts' ranks: %s", strerror(errno));
  return list_addresses(door, any.sin6_port);
}

static oproj_status listen_on_host(const oproj_link_door *door, int listener) {
  struct sockaddr_un address;
  socklen_t length = local_address(door, &address);
  REQUIRE(bind(listener, (struct sockaddr *)&address, length) == 0, OPROJ_ERR_COMM,
          "no socket for the other ranks: %s", strerror(errno));
  return OPROJ_OK;
}

oproj_status oproj_link_open_door(int32_t one_host, oproj_link_door *door, int *listener) {
  *door = (oproj_link_door){.one_host = one_host};
  REQUIRE(getrandom(&door->token, sizeof door->token, 0) == sizeof door->token, OPROJ_ERR_COMM,
          "no random number: %s", strerror(errno));
  int file = socket(one_host ? AF_UNIX : AF_INET6,
                    (one_host ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  REQUIRE(file >= 0, OPROJ_ERR_COMM, "no socket: %s", strerror(errno));
  oproj_status status = one_host ? listen_on_host(door, file) : listen_over_tcp(door, file);
  if (status == OPROJ_OK && listen(file, SOMAXCONN) != 0)
    status = oproj_fail(OPROJ_ERR_COMM, "cannot listen: %s", strerror(errno));
  if (status != OPROJ_OK) {
    close(file);
    return status;
  }
  *listener = file;
  return OPROJ_OK;
}

/* Waits for a whole frame. */
static int receive_within(oproj_link *link, int64_t until_ms) {
  int got;
  while ((got = oproj_link_receive(link)) == 0) {
    int64_t left = until_ms - milliseconds();
    struct pollfd one = {.fd = link->file, .events = POLLIN};
    if (left <= 0 || poll(&one, 1, (int)left) < 0) return 0;
  }
  return got;
}

oproj_status oproj_link_admit(int listener, const oproj_link_door *door, int within_ms,
                              oproj_link *out, int32_t *rank) {
  int64_t until = milliseconds() + within_ms;
  for (;;) {
    int64_t left = until - milliseconds();
    struct pollfd one = {.fd = listener, .events = POLLIN};
    REQUIRE(left > 0 && poll(&one, 1, (int)left) > 0, OPROJ_ERR_COMM,
            "no other rank came within %d ms", within_ms);
    *out = (oproj_link){.file = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)};
    if (out->file < 0) continue;
    if (receive_within(out, until) == 1 && out->in.kind == OPROJ_LINK_HELLO &&
        out->in.token == door->token) {
      *rank = out->in.rank;
      return OPROJ_OK;
    }
    oproj_link_close(out);
  }
}

/* ---- the others' way in --------------------------------------------------------------------- */

/* A connection, or -1 with errno. */
static int connect_within(int family, int type, const struct sockaddr *to, socklen_t length,
                          int within_ms) {
  int file = socket(family, type | SOCK_CLOEXEC, 0), error = 0;
  socklen_t error_bytes = sizeof error;
  if (file < 0) return -1;
  if (set_nonblocking(file) == 0 && connect(file, to, length) == 0) return file;
  struct pollfd one = {.fd = file, .events = POLLOUT};
  if (errno == EINPROGRESS && poll(&one, 1, within_ms) == 0) error = ETIMEDOUT;
  if (errno != EINPROGRESS) error = errno;
  if (error == 0 && getsockopt(file, SOL_SOCKET, SO_ERROR, &error, &error_bytes) == 0 && error == 0)
    return file;
  close(file);
  errno = error;
  return -1;
}

static oproj_status connect_over_tcp(const oproj_link_door *door, int within_ms, int *file) {
  char tried[400] = "";
  for (int32_t i = 0; i < door->count; i++) {
    const struct sockaddr_in6 *to = &door->at[i].address;
    *file =
        connect_within(AF_INET6, SOCK_STREAM, (const struct sockaddr *)to, sizeof *to, within_ms);
    if (*file >= 0) return OPROJ_OK;
    char address[INET6_ADDRSTRLEN] = "?";
    int error = errno;
    inet_ntop(AF_INET6, &to->sin6_addr, address, sizeof address);
    size_t used = strlen(tried);
    snprintf(tried + used, sizeof tried - used, "%s%s on its interface %s: %s", used ? ", " : "",
             address, door->at[i].interface, strerror(error));
  }
  return oproj_fail(OPROJ_ERR_COMM, "rank 0 does not answer (%s)", tried);
}

oproj_status oproj_link_enter(const oproj_link_door *door, int32_t rank, int within_ms,
                              oproj_link *out) {
  *out = (oproj_link){.file = -1};
  if (door->one_host) {
    struct sockaddr_un address;
    socklen_t length = local_address(door, &address);
    out->file =
        connect_within(AF_UNIX, SOCK_SEQPACKET, (struct sockaddr *)&address, length, within_ms);
    REQUIRE(out->file >= 0, OPROJ_ERR_COMM, "rank 0's socket does not answer: %s", strerror(errno));
  } else {
    TRY(connect_over_tcp(door, within_ms, &out->file));
  }
  oproj_link_send(
      out, &(oproj_link_frame){.token = door->token, .kind = OPROJ_LINK_HELLO, .rank = rank}, 0);
  return OPROJ_OK;
}

/* ---- frames --------------------------------------------------------------------------------- */

void oproj_link_send(oproj_link *link, const oproj_link_frame *frame, int within_ms) {
  struct pollfd one = {.fd = link->file, .events = POLLOUT};
  if (link->file < 0 || (within_ms > 0 && poll(&one, 1, within_ms) <= 0)) return;
  ssize_t sent = send(link->file, frame, sizeof *frame, MSG_NOSIGNAL | MSG_DONTWAIT);
  /* Half a frame would garble those behind it.  Reading goes on: what came may say why. */
  if (sent >= 0 && (size_t)sent < sizeof *frame) shutdown(link->file, SHUT_WR);
}

int oproj_link_receive(oproj_link *link) {
  if (link->file < 0) return -1;
  if (link->got == sizeof link->in) link->got = 0;
  char *to = (char *)&link->in + link->got;
  ssize_t got = recv(link->file, to, sizeof link->in - link->got, MSG_DONTWAIT);
  /* A local socket tells this first, and then what had come before. */
  if (got < 0 && errno == ECONNRESET)
    got = recv(link->file, to, sizeof link->in - link->got, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  if (got == 0) return -1;
  link->got += (size_t)got;
  return link->got == sizeof link->in;
}

void oproj_link_close(oproj_link *link) {
  if (link->file >= 0) close(link->file);
  link->file = -1;
}
