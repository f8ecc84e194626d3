/* link.h - connections between rank 0 and every other rank, beside MPI's: frames of one size.
 *
 * Where all ranks share a host they meet at a socket in the abstract namespace, which leaves no
 * file behind; over several hosts at a TCP port of rank 0, on whichever of its addresses
 * answers. */
#ifndef OPROJ_TP_LINK_H
#define OPROJ_TP_LINK_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

#include "oproj.h"
#include "tp/board.h"

typedef enum oproj_link_kind {
  OPROJ_LINK_HELLO,   /* who connects */
  OPROJ_LINK_REPORT,  /* `report` is of the sender */
  OPROJ_LINK_VERDICT, /* `rank` is lost, as `sentence` says */
  OPROJ_LINK_GOODBYE  /* the sender ends its watch */
} oproj_link_kind;

typedef struct oproj_link_frame {
  uint64_t token; /* the same for all ranks of a communicator, and hard to guess */
  int32_t kind, rank;
  oproj_board_report report;
  char sentence[OPROJ_BOARD_SENTENCE];
} oproj_link_frame;

/* Where rank 0 waits for the others. */
typedef struct oproj_link_door {
  uint64_t token;
  int32_t one_host;
  int32_t count; /* addresses */
  struct {
    char interface[16];
    struct sockaddr_in6 address; /* IPv4 as ::ffff:a.b.c.d */
  } at[8];
} oproj_link_door;

/* One connection.  `in` collects a frame that has come in part. */
typedef struct oproj_link {
  int file; /* -1: none */
  size_t got;
  oproj_link_frame in;
} oproj_link;

/* Rank 0: begins to listen; *listener is closed by the caller. */
oproj_status oproj_link_open_door(int32_t one_host, oproj_link_door *door, int *listener);

/* Rank 0: takes one connection in, before `within_ms`; *rank is who it is.  Strangers are turned
 * away. */
oproj_status oproj_link_admit(int listener, const oproj_link_door *door, int within_ms,
                              oproj_link *out, int32_t *rank);

/* The others: ERR_COMM names the addresses that did not answer within `within_ms` each. */
oproj_status oproj_link_enter(const oproj_link_door *door, int32_t rank, int within_ms,
                              oproj_link *out);

/* Hands a frame over; one that a full connection does not take within `within_ms` is dropped. */
void oproj_link_send(oproj_link *link, const oproj_link_frame *frame, int within_ms);

/* 1: link->in is a whole frame; 0: not yet; -1: the connection has ended. */
int oproj_link_receive(oproj_link *link);

void oproj_link_close(oproj_link *link); /* a closed one is allowed */

#endif /* OPROJ_TP_LINK_H */
