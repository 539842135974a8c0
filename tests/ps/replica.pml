/*
 * The protocol of two copies of one part (docs/ps.md, ps/internal/replica_protocol.h), a second time and apart
 * from the C++ code: three servers, the map in the store, clients that push and read. tests/ps/spin_test.py has
 * it checked by spin.
 *
 * The network loses, repeats and reorders without a bound: what was sent stays on its way for good, and may
 * arrive at any time, often, or never. A message of the log is known by (epoch, position), since one epoch has
 * one owner: log_of[e] is what its log says, up to end_of[e]. Bounded are what clients do (PUSHES, READS, each
 * sent SENDS times at most), deaths (KILLS), suspicion of a server that lives (SUSPICIONS), offers to become the
 * backup (OFFERS) and answers of the store that are lost (LOST). Every run ends; Monitor asserts what holds then.
 *
 * -DBUG_... plants a bug: the twelve of the C++ tests, and one more.
 */

#ifndef PUSHES
#define PUSHES 1
#endif
#ifndef READS
#define READS 1
#endif
#ifndef SENDS
#define SENDS 1
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef SUSPICIONS
#define SUSPICIONS 1
#endif
#ifndef OFFERS
#define OFFERS 1
#endif
#ifndef LOST
#define LOST 0
#endif

#define SERVERS 3
#define OPS (PUSHES + READS)
#define EPOCHS (3 + KILLS + SUSPICIONS + OFFERS)

/* A map as a number; there is no server NONE. A push is a number from 1 on, at most 3; a log has two bits for
 * each position: the push, or 0 for what changes nothing. */
#define NONE 3
#define MAP(epoch, owner, backup, ready) ((epoch) * 32 + (owner) * 8 + (backup) * 2 + (ready))
#define EPOCH(m) ((m) / 32)
#define OWNER(m) (((m) / 8) & 3)
#define BACKUP(m) (((m) / 2) & 3)
#define READY(m) ((m) & 1)
#define AT(log, position) (((log) >> (2 * (position) - 2)) & 3)
#define UP_TO(position) ((1 << (2 * (position))) - 1)
#define BIT(i) (1 << (i))

byte kills = KILLS, suspicions = SUSPICIONS, offers = OFFERS, lost_answers = LOST;

/* The store, and for each epoch that was ever written there: who, and what its owner has sent. */
short store = MAP(1, 0, NONE, 0);
byte newest = 1;
byte owner_of[EPOCHS], backup_of[EPOCHS];
byte image_of[EPOCHS];    /* 0: none was sent; else its position + 1 */
byte pushes_of[EPOCHS];   /* in the image: a set */
int log_of[EPOCHS];
byte end_of[EPOCHS];
short confirmed_of[EPOCHS]; /* positions that the backup has confirmed: a set */

/* A copy. */
#define NO_COPY 0
#define IS_OWNER 1
#define IS_BACKUP 2
#define GONE 3
byte role[SERVERS];
bool dead[SERVERS];
short map[SERVERS];
byte last[SERVERS], confirmed[SERVERS], released[SERVERS];
bool gate[SERVERS], lost[SERVERS], want[SERVERS];
int log[SERVERS];
byte length[SERVERS];     /* of the log; `last`, but for a bug */
byte has[SERVERS];        /* pushes in the values: a set */
byte knows[SERVERS];      /* pushes whose numbers it knows: a set */
byte image_taken[SERVERS]; /* the newest epoch of an image */

/* A write of the map: 0 none, 1 under way, 2 done and the answer is under way. */
byte writing[SERVERS];
short expected[SERVERS], desired[SERVERS], found[SERVERS];

/* Clients. One that has been answered may ask again: the answer was lost. A read notes what had been acknowledged when it began, and what it saw. */
byte sends[OPS];
byte waits[SERVERS * OPS];  /* its position + 1 at this server */
byte must[SERVERS * OPS], saw[SERVERS * OPS];
byte seen;                  /* pushes that were acknowledged, or answered to a read: a set */

/* Always false: what spin names where one is violated. */
hidden byte PSR_1_a_push_is_in_once, PSR_10_a_copy_has_what_was_seen, PSR_10_what_may_take_over_is_a_copy;
hidden byte PSR_11_a_read_sees_what_was_seen_before, PSR_12_a_backup_has_the_log_of_its_owner;
hidden byte at_rest_nothing_waits, at_rest_one_owns, at_rest_a_ready_backup_has_taken_over, at_rest_copies_are_equal;

hidden byte i;
hidden byte value;

#define STREAMS(s) (role[s] == IS_OWNER && BACKUP(map[s]) != NONE && !lost[s])
#define COUNT(position, most) ((position) < (most) -> (position) : (most))

inline release(s) {
  for (i : 0 .. OPS - 1) {
    if
    :: waits[s * OPS + i] > 0 && waits[s * OPS + i] - 1 <= released[s] ->
         waits[s * OPS + i] = 0;
         if
         :: i < PUSHES -> seen = seen | BIT(i + 1)
         :: else ->
              assert((must[s * OPS + i] & ~saw[s * OPS + i]) == 0 || PSR_11_a_read_sees_what_was_seen_before);
              seen = seen | saw[s * OPS + i];
              must[s * OPS + i] = 0;
              saw[s * OPS + i] = 0
         fi
    :: else
    fi
  }
  i = 0
}

#ifdef BUG_RELEASE_EARLY
#define CLOSED(s) false
#else
#define CLOSED(s) gate[s]
#endif
#define LIMIT(s) (CLOSED(s) -> COUNT(confirmed[s], last[s]) : last[s])

inline settle(s) {
  if
  :: role[s] == IS_OWNER && LIMIT(s) > released[s] -> released[s] = LIMIT(s); release(s)
  :: else
  fi
}

inline write(s, from, to) {
  writing[s] = 1;
  expected[s] = from;
  desired[s] = to;
  found[s] = 0;
  want[s] = true
}

inline write_alone(s) {
#ifdef BUG_OPEN_WHILE_LEAVING
  gate[s] = false;
#else
  if
  :: !READY(map[s]) -> gate[s] = false
  :: else
  fi;
#endif
  write(s, map[s], MAP(EPOCH(map[s]) + 1, s, NONE, 0));
  settle(s)
}

inline write_ready_if_it_has_all(s) {
#ifdef BUG_READY_TOO_EARLY
#define HAS_ALL(s) true
#else
#define HAS_ALL(s) (confirmed[s] >= released[s])
#endif
  if
  :: STREAMS(s) && !READY(map[s]) && !want[s] && HAS_ALL(s) -> write(s, map[s], map[s] + 1)
  :: else
  fi
}

inline forget(s) {
  for (i : 0 .. OPS - 1) {
    waits[s * OPS + i] = 0;
    must[s * OPS + i] = 0;
    saw[s * OPS + i] = 0
  }
  i = 0
}

/* What a server that is none of the two copies had is not compared. */
inline drop(s, what) {
  role[s] = what;
  map[s] = 0; last[s] = 0; confirmed[s] = 0; released[s] = 0;
  gate[s] = false; lost[s] = false; want[s] = false;
  log[s] = 0; length[s] = 0; has[s] = 0; knows[s] = 0;
  forget(s)
}

inline send_image(s) {
  image_of[EPOCH(map[s])] = last[s] + 1;
  pushes_of[EPOCH(map[s])] = has[s];
  log_of[EPOCH(map[s])] = log[s];
  end_of[EPOCH(map[s])] = last[s]
}

inline learn(s, now) {
  if
  :: role[s] == IS_OWNER && OWNER(now) == s ->
       if
       :: EPOCH(now) != EPOCH(map[s]) ->
            map[s] = now;
            confirmed[s] = 0; lost[s] = false; gate[s] = false;
            if
            :: BACKUP(now) != NONE -> send_image(s)
            :: else
            fi
       :: else -> map[s] = now
       fi
#ifdef BUG_OWNER_STAYS
  :: role[s] == IS_OWNER && OWNER(now) != s -> gate[s] = false; settle(s)
  :: role[s] == IS_BACKUP -> drop(s, GONE)
#else
  :: else -> drop(s, GONE)
#endif
  fi
}

inline wrote(s) {
  want[s] = false;
  if
  :: role[s] == IS_BACKUP && found[s] == desired[s] -> role[s] = IS_OWNER; map[s] = found[s]
  :: role[s] == IS_BACKUP && found[s] != desired[s] && EPOCH(found[s]) != EPOCH(map[s]) -> drop(s, GONE)
  :: role[s] == IS_BACKUP && found[s] != desired[s] && EPOCH(found[s]) == EPOCH(map[s]) -> skip
  :: else ->
       learn(s, found[s]);
       if
       :: role[s] == IS_OWNER && lost[s] && BACKUP(map[s]) != NONE -> write_alone(s)
       :: role[s] == IS_OWNER && !(lost[s] && BACKUP(map[s]) != NONE) ->
            if
            :: gate[s] && confirmed[s] >= released[s] -> write_ready_if_it_has_all(s)
            :: else
            fi;
            settle(s)
       :: else
       fi
  fi
}

/* `value` is done at position last + 1, which the log has. */
inline apply(s) {
  last[s]++;
  length[s]++;
  if
  :: value != 0 ->
       assert((has[s] & BIT(value)) == 0 || PSR_1_a_push_is_in_once);
       has[s] = has[s] | BIT(value);
       knows[s] = knows[s] | BIT(value);
       log[s] = log[s] | (value << (2 * (length[s] - 1)))
  :: else
  fi
}

#define ASK(op) \
  :: d_step { role[s] == IS_OWNER && sends[op] < SENDS && waits[s * OPS + op] == 0 -> \
       sends[op]++; \
       ask(s, op) }

inline ask(s, op) {
  value = (op < PUSHES && (knows[s] & BIT(op + 1)) == 0 -> op + 1 : 0);
#ifdef BUG_READ_WITHOUT_LOG
  if
  :: op < PUSHES -> apply(s)
  :: else
  fi;
#else
  apply(s);
#endif
  if
  :: STREAMS(s) -> log_of[EPOCH(map[s])] = log[s]; end_of[EPOCH(map[s])] = last[s]
  :: else
  fi;
  waits[s * OPS + op] = last[s] + 1;
  if
  :: op >= PUSHES -> must[s * OPS + op] = seen; saw[s * OPS + op] = has[s]
  :: else
  fi;
  value = 0;
  settle(s);
  release(s)
}

/* Three servers, none of which may be offered to itself. */
#define OFFER(to) \
  :: d_step { role[s] == IS_OWNER && BACKUP(map[s]) == NONE && !want[s] && offers > 0 && s != to && !dead[to] -> \
       offers--; \
       write(s, map[s], MAP(EPOCH(map[s]) + 1, s, to, 0)) }

inline take_image(s, e) {
  drop(s, IS_BACKUP);
  image_taken[s] = e;
  map[s] = MAP(e, owner_of[e], s, 0);
  last[s] = image_of[e] - 1;
  released[s] = last[s];
  length[s] = last[s];
  log[s] = log_of[e] & UP_TO(last[s]);
  has[s] = pushes_of[e];
#ifndef BUG_NUMBERS_NOT_MOVED
  knows[s] = pushes_of[e];
#endif
  confirmed_of[e] = confirmed_of[e] | BIT(last[s])
}

#ifdef BUG_GATE_AT_READY
#define OPENS(s) (READY(map[s]) && !gate[s])
#else
#define OPENS(s) (!gate[s])
#endif

/* The backup has all up to `value`. */
inline confirm(s) {
  confirmed[s] = (value > confirmed[s] -> value : confirmed[s]);
  value = 0;
#ifdef BUG_GATE_AT_READY
  gate[s] = (READY(map[s]) -> true : gate[s]);
#else
  gate[s] = true;
#endif
  write_ready_if_it_has_all(s);
  settle(s)
}

/* A map of a later epoch, from the store or from another server, perhaps long ago. */
#define HEAR(e) \
  :: d_step { (role[s] == IS_OWNER || role[s] == IS_BACKUP) && EPOCH(map[s]) < e && e <= newest && owner_of[e] != s -> \
       learn(s, MAP(e, owner_of[e], backup_of[e], 0)) }

#define TAKE_IMAGE(e) \
  :: d_step { !dead[s] && image_taken[s] < e && e <= newest && image_of[e] > 0 && backup_of[e] == s -> \
       take_image(s, e) }

#define TAKE_OLD(e) \
  :: d_step { (role[s] == IS_OWNER || role[s] == IS_BACKUP) && e <= newest && (e < EPOCH(map[s]) || want[s]) && backup_of[e] == s && \
              end_of[e] > last[s] -> \
       value = AT(log_of[e], last[s] + 1); \
       apply(s); \
       value = 0; \
       released[s] = (role[s] == IS_BACKUP -> last[s] : released[s]); \
       confirmed_of[e] = confirmed_of[e] | BIT(last[s]); \
       settle(s) }

#define CONFIRM(p) \
  :: d_step { STREAMS(s) && p <= last[s] && (confirmed_of[EPOCH(map[s])] & BIT(p)) && (OPENS(s) || p > confirmed[s]) -> \
       value = p; \
       confirm(s) }

#define CONFIRM_OLD(e) \
  :: d_step { STREAMS(s) && e < EPOCH(map[s]) && owner_of[e] == s && confirmed[s] < last[s] && \
              (confirmed_of[e] & BIT(last[s])) -> \
       value = last[s]; \
       confirm(s) }

/* Not as loops: a choice that changes nothing would be no end. */
#if EPOCHS > 8 || OPS * SENDS > 8
#error "more epochs or positions than are listed here"
#endif
#define EACH_EPOCH(what) what(2) what(3) what(4) what(5) what(6) what(7)
#define EACH_POSITION(what) what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7) what(8)

proctype Server(byte s) {
end:
  do
  ASK(0)
#if OPS > 1
  ASK(1)
#endif
#if OPS > 2
  ASK(2)
#endif
#if OPS > 3
  ASK(3)
#endif
  OFFER(0)
  OFFER(1)
  OFFER(2)

  /* The store. A write that was sent is done at last, also after its server's death; its answer may be lost, and then
   * it is sent again. */
  :: d_step { writing[s] == 1 && !(dead[s] && store != expected[s]) ->
       if
       :: store == expected[s] ->
            store = desired[s];
            if
            :: EPOCH(store) > newest ->
                 newest = EPOCH(store);
                 owner_of[newest] = OWNER(store);
                 backup_of[newest] = BACKUP(store)
            :: else
            fi
       :: else
       fi;
       if
       :: dead[s] -> writing[s] = 0; expected[s] = 0; desired[s] = 0
       :: else -> writing[s] = 2; found[s] = store
       fi }
  :: d_step { writing[s] == 2 && !dead[s] && lost_answers > 0 -> lost_answers--; writing[s] = 1; found[s] = 0 }
  :: d_step { writing[s] == 2 && !dead[s] ->
       writing[s] = 0;
       if
       :: want[s] -> wrote(s)
       :: else
       fi;
       if
       :: writing[s] == 0 -> expected[s] = 0; desired[s] = 0; found[s] = 0
       :: else
       fi }

  /* Suspicion. Of a server that has died it is free. */
  :: d_step { STREAMS(s) && (suspicions > 0 || dead[BACKUP(map[s])]) ->
       suspicions = (dead[BACKUP(map[s])] -> suspicions : suspicions - 1);
       lost[s] = true;
       if
       :: want[s] ->
#ifdef BUG_GATE_FORGOTTEN
            gate[s] = false;
#endif
            settle(s)
       :: else -> write_alone(s)
       fi }
  :: d_step { role[s] == IS_BACKUP && !want[s] &&
              (suspicions > 0 || (dead[OWNER(map[s])] && store == MAP(EPOCH(map[s]), OWNER(map[s]), s, 1))) ->
       suspicions = (dead[OWNER(map[s])] && store == MAP(EPOCH(map[s]), OWNER(map[s]), s, 1) -> suspicions : suspicions - 1);
#ifdef BUG_TAKES_OVER_JOINING
       write(s, MAP(EPOCH(map[s]), OWNER(map[s]), s, 0), MAP(EPOCH(map[s]) + 1, s, NONE, 0))
#else
       write(s, MAP(EPOCH(map[s]), OWNER(map[s]), s, 1), MAP(EPOCH(map[s]) + 1, s, NONE, 0))
#endif
       }

  EACH_EPOCH(HEAR)
  EACH_EPOCH(TAKE_IMAGE)
  :: d_step { role[s] == IS_BACKUP && !want[s] && last[s] < end_of[EPOCH(map[s])] ->
       value = AT(log_of[EPOCH(map[s])], last[s] + 1);
       apply(s);
       value = 0;
       released[s] = last[s];
       confirmed_of[EPOCH(map[s])] = confirmed_of[EPOCH(map[s])] | BIT(last[s]) }
#ifdef BUG_TAKES_GAPS
  :: d_step { role[s] == IS_BACKUP && !want[s] && last[s] + 1 < end_of[EPOCH(map[s])] ->
       value = AT(log_of[EPOCH(map[s])], last[s] + 2);
       apply(s);
       value = 0;
       last[s]++;
       released[s] = last[s];
       confirmed_of[EPOCH(map[s])] = confirmed_of[EPOCH(map[s])] | BIT(last[s]) }
#endif
#ifdef BUG_REPEATS
  :: d_step { role[s] == IS_BACKUP && !want[s] && last[s] > 0 && length[s] == last[s] ->
       value = AT(log_of[EPOCH(map[s])], last[s]);
       apply(s);
       value = 0;
       last[s]-- }
#endif
#ifdef BUG_OLD_EPOCH
  EACH_EPOCH(TAKE_OLD)
#endif
  EACH_POSITION(CONFIRM)
#ifdef BUG_CONFIRMS_OLD_EPOCH
  EACH_EPOCH(CONFIRM_OLD)
#endif
  :: d_step { kills > 0 && !dead[s] -> kills--; drop(s, NO_COPY); dead[s] = true }
  od
}

/* What counts as a copy: the owner that the map names, also one that has not yet heard that it took over, and a backup that may
 * take over. */
#define COUNTS(s) ((OWNER(store) == s && (role[s] == IS_OWNER || want[s])) || \
                   (store == MAP(EPOCH(map[s]), OWNER(map[s]), s, 1) && role[s] == IS_BACKUP))
#define HAS_WHAT_WAS_SEEN(s) (!COUNTS(s) || (seen & ~has[s]) == 0)
#define MAY_TAKE_OVER(s) (READY(store) && BACKUP(store) == s && !dead[s])
#define IS_THE_COPY(s) (role[s] == IS_BACKUP && EPOCH(map[s]) == EPOCH(store))
#define FOLLOWS(s) (role[s] != IS_BACKUP || \
                    (length[s] == last[s] && ((log[s] ^ log_of[EPOCH(map[s])]) & UP_TO(last[s])) == 0))
#define RESTS(s) (role[s] != IS_OWNER || \
                  (OWNER(store) == s && map[s] == store && !want[s] && ALL_ANSWERED(s)))
#define ALL_ANSWERED(s) (released[s] == last[s])

active proctype Monitor() {
  do
  :: atomic { !(HAS_WHAT_WAS_SEEN(0) && HAS_WHAT_WAS_SEEN(1) && HAS_WHAT_WAS_SEEN(2)) ->
       assert(PSR_10_a_copy_has_what_was_seen) }
  :: atomic { (MAY_TAKE_OVER(0) && !IS_THE_COPY(0)) || (MAY_TAKE_OVER(1) && !IS_THE_COPY(1)) ||
              (MAY_TAKE_OVER(2) && !IS_THE_COPY(2)) ->
       assert(PSR_10_what_may_take_over_is_a_copy) }
  :: atomic { !(FOLLOWS(0) && FOLLOWS(1) && FOLLOWS(2)) -> assert(PSR_12_a_backup_has_the_log_of_its_owner) }
  /* Nothing more can happen. */
  :: atomic { timeout ->
       assert((RESTS(0) && RESTS(1) && RESTS(2)) || at_rest_nothing_waits);
       assert(dead[OWNER(store)] || role[OWNER(store)] == IS_OWNER || at_rest_one_owns);
       assert(!dead[OWNER(store)] || !READY(store) || dead[BACKUP(store)] || at_rest_a_ready_backup_has_taken_over);
       if
       :: READY(store) && !dead[OWNER(store)] && !dead[BACKUP(store)] ->
            assert((last[OWNER(store)] == last[BACKUP(store)] && log[OWNER(store)] == log[BACKUP(store)]) ||
                   at_rest_copies_are_equal)
       :: else
       fi;
       break }
  od
}

init {
  atomic {
    owner_of[1] = 0;
    backup_of[1] = NONE;
    role[0] = IS_OWNER;
    map[0] = store;
    run Server(0);
    run Server(1);
    run Server(2)
  }
}
