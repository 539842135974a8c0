/*
 * The protocol of references (docs/rref.md), a second time and apart from the C++ code: one object of the
 * owner O, made by the creator A and shared with a third worker C, over a network that loses, repeats and
 * reorders, with the crash of one of them. tests/rref/spin_test.py has it checked by spin.
 *
 * m_x is the number of copies of message x under way, k_x of its acknowledgement. An item is sent again
 * when it is lost. LOSSES, REPEATS, GIVE_UPS and CRASHES bound the faults, so that every run ends; what
 * must hold at the end is asserted by the monitor. -DBUG_NO_TOMBSTONE and -DBUG_EARLY_PARENT plant bugs.
 */

#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef REPEATS
#define REPEATS 1
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

byte losses = LOSSES, repeats = REPEATS, give_ups = GIVE_UPS, crashes = CRASHES;

/* The network. */
byte m_create, m_answer, m_known, m_abandon, k_abandon, m_delete_a, k_delete_a, m_next;
byte m_share, m_shared, m_accept, k_accept, m_audit, k_audit_none, k_audit_pending, k_audit_held;
byte m_fork, k_fork, k_fork_no, m_delete_c, k_delete_c, m_use, k_use, k_use_error, k_use_gone;
bool delete_a_floor, delete_c_floor; /* the floor that the delete carries has passed what it deletes */

bool up_o = true, up_a = true, up_c = true;
bool o_lost_a, o_lost_c, a_lost_o, a_lost_c, c_lost_o, c_lost_a; /* who has heard of whose death */

/* The owner. A fork is unknown, live or a tombstone. */
#define UNKNOWN 0
#define LIVE 1
#define TOMBSTONE 2
byte fork_a, fork_c;
bool created_a;           /* with its tombstone: the creation has been here */
bool floor_a, floor_c;    /* the floor has passed the creation, the fork */
bool created, running, ready, is_error, parked, known_sent;
bool started, released, deleted_a, deleted_c; /* the truth */

/* The creator. */
#define NONE 0
#define PENDING 1
#define CONFIRMED 2
#define FAILED 3
#define DROPPED 4
byte state_a;
bool has_a, call_open, settled_a, abandoned, abandon_done, deleting_a, delete_a_done, next_sent;
bool shared, child_open, share_open, auditing, audit_done;

/* The third worker. */
byte state_c;
bool got_share, is_void, accept_now, accepting, accept_done, fork_done, deleting_c, delete_c_done;
bool waits_c, used_c;

#define OBJECT (fork_a == LIVE || fork_c == LIVE || running || parked || ready)

inline release_if_unused() {
  if
  :: fork_a != LIVE && fork_c != LIVE && !running && !parked && ready ->
       if
       :: !is_error ->
            assert(!released);                                          /* RREF-1 */
            assert(!(up_a && has_a && state_a != FAILED && !deleting_a));  /* RREF-1 */
            assert(!(up_c && state_c == CONFIRMED));                    /* RREF-1: no use after delete */
            released = true
       :: else
       fi;
       created = false; ready = false; is_error = false
  :: else
  fi
}

inline end_uses() {
  if
  :: parked -> parked = false;
       if
       :: is_error -> k_use_error++
       :: else -> k_use++
       fi
  :: else
  fi
}

inline start() {
  assert(!started);                                                     /* RREF-5 */
  started = true; created = true; running = true
}

inline become_error() { created = true; ready = true; is_error = true; end_uses() }

inline hear_floor_a() {
  floor_a = true;
  if
  :: fork_a == TOMBSTONE -> fork_a = UNKNOWN
  :: else
  fi
}

active proctype Owner() {
end:
  do
  :: atomic { up_o && m_create > 0 -> m_create--;
       if
       :: o_lost_a || floor_a
       :: else ->
            if
            :: fork_a == UNKNOWN -> fork_a = LIVE; start()
            :: fork_a == TOMBSTONE && !created_a -> created_a = true; start()
            :: else
            fi
       fi }
  :: atomic { up_o && running -> running = false; ready = true; end_uses();
       if
       :: up_a -> m_answer++
       :: else
       fi;
       release_if_unused() }
  :: atomic { up_o && running && !known_sent && up_a -> known_sent = true; m_known++ }
  :: atomic { up_o && m_abandon > 0 -> m_abandon--;
       if
       :: o_lost_a || floor_a
       :: else ->
            if
            :: fork_a == UNKNOWN -> fork_a = LIVE;
                 if
                 :: !created -> become_error()
                 :: else
                 fi
            :: fork_a == TOMBSTONE && !created_a -> created_a = true;
                 if
                 :: OBJECT && !created -> become_error(); release_if_unused()
                 :: else
                 fi
            :: else
            fi
       fi;
       if
       :: up_a -> k_abandon++
       :: else
       fi }
  :: atomic { up_o && m_delete_a > 0 -> m_delete_a--;
       if
       :: o_lost_a
       :: else ->
            if
            :: delete_a_floor -> hear_floor_a()
            :: else
            fi;
            assert(!(child_open && up_c && state_c == PENDING && !a_lost_c)); /* RREF-4 */
            deleted_a = true;
            if
            :: fork_a == LIVE -> fork_a = (floor_a -> UNKNOWN : TOMBSTONE); created_a = created
            :: fork_a == UNKNOWN && !floor_a ->
#ifndef BUG_NO_TOMBSTONE
                 fork_a = TOMBSTONE;
#endif
                 created_a = false
            :: else
            fi;
            release_if_unused()
       fi;
       if
       :: up_a -> k_delete_a++
       :: else
       fi }
  :: atomic { up_o && m_next > 0 -> m_next--;
       if
       :: o_lost_a
       :: else -> hear_floor_a()
       fi }
  :: atomic { up_o && m_fork > 0 -> m_fork--;
       if
       :: o_lost_c || floor_c || fork_c == LIVE -> k_fork++
       :: !o_lost_c && !floor_c && fork_c == TOMBSTONE -> k_fork_no++
       :: !o_lost_c && !floor_c && fork_c == UNKNOWN ->
            if
            :: OBJECT || !o_lost_a -> fork_c = LIVE; k_fork++
            :: else -> fork_c = TOMBSTONE; k_fork_no++
            fi
       fi;
       if
       :: !up_c -> k_fork = 0; k_fork_no = 0
       :: else
       fi }
  :: atomic { up_o && m_delete_c > 0 -> m_delete_c--;
       if
       :: o_lost_c
       :: else ->
            deleted_c = true;
            if
            :: delete_c_floor -> floor_c = true; fork_c = UNKNOWN
            :: else -> fork_c = TOMBSTONE
            fi;
            release_if_unused()
       fi;
       if
       :: up_c -> k_delete_c++
       :: else
       fi }
  :: atomic { up_o && m_use > 0 -> m_use--;
       if
       :: o_lost_c || !up_c
       :: else ->
            if
            :: fork_c != LIVE -> k_use_gone++
            :: fork_c == LIVE && ready && is_error -> k_use_error++
            :: fork_c == LIVE && ready && !is_error -> k_use++
            :: fork_c == LIVE && !ready -> parked = true
            fi
       fi }
  :: atomic { up_o && !up_a && !o_lost_a -> o_lost_a = true; fork_a = UNKNOWN;
       if
       :: OBJECT && !created -> become_error()
       :: else
       fi;
       release_if_unused() }
  :: atomic { up_o && !up_c && !o_lost_c -> o_lost_c = true; fork_c = UNKNOWN; parked = false;
       release_if_unused() }
  od
}

inline confirm_a() {
  settled_a = true;
  if
  :: state_a == PENDING -> state_a = CONFIRMED
  :: else
  fi
}

inline fail_creation() {
  call_open = false;
  if
  :: state_a == PENDING && !a_lost_o -> abandoned = true; m_abandon++
  :: else
  fi;
  state_a = FAILED
}

active proctype Creator() {
  atomic { state_a = PENDING; has_a = true; call_open = true; m_create = 1 };
end:
  do
  :: atomic { up_a && up_c && has_a && !deleting_a && state_a != FAILED && !shared && !a_lost_c ->
       shared = true; child_open = true; share_open = true; m_share = 1 }
  :: atomic { up_a && has_a -> has_a = false }
  :: atomic { up_a && !has_a && !child_open && !deleting_a -> deleting_a = true;
       if
       :: !a_lost_o && up_o -> delete_a_floor = settled_a; m_delete_a++
       :: else
       fi }
  /* Anything later to the owner carries the floor. */
  :: atomic { up_a && up_o && settled_a && !next_sent -> next_sent = true; m_next++ }
  :: atomic { up_a && m_answer > 0 -> m_answer--;
       if
       :: call_open -> call_open = false; confirm_a()
       :: else
       fi }
  :: atomic { up_a && m_known > 0 -> m_known--;
       if
       :: state_a == PENDING -> confirm_a()
       :: else
       fi }
  :: atomic { up_a && call_open && give_ups > 0 -> give_ups--; fail_creation() }
  :: atomic { up_a && k_abandon > 0 -> k_abandon--; abandon_done = true; settled_a = true }
  :: atomic { up_a && k_delete_a > 0 -> k_delete_a--; delete_a_done = true }
  :: atomic { up_a && m_shared > 0 -> m_shared--; child_open = false; share_open = false }
  :: atomic { up_a && m_accept > 0 -> m_accept--; child_open = false;
       if
       :: up_c -> k_accept++
       :: else
       fi }
  :: atomic { up_a && share_open && child_open && give_ups > 0 -> give_ups--; share_open = false;
#ifdef BUG_EARLY_PARENT
       child_open = false
#else
       if
       :: up_c -> auditing = true; m_audit++
       :: else
       fi
#endif
       }
  :: atomic { up_a && k_audit_none > 0 -> k_audit_none--; audit_done = true; child_open = false }
  :: atomic { up_a && k_audit_held > 0 -> k_audit_held--; audit_done = true; child_open = false }
  :: atomic { up_a && k_audit_pending > 0 -> k_audit_pending--; audit_done = true }
  /* A call whose answer was lost for good, or that cannot be answered, is given up in the end. */
  :: atomic { up_a && call_open && m_create == 0 && m_answer == 0 && !running -> fail_creation() }
  :: atomic { up_a && share_open && child_open && up_c && m_share == 0 && m_shared == 0 &&
              (!got_share || (state_c != PENDING && state_c != NONE)) ->
       share_open = false; auditing = true; m_audit++ }
  :: atomic { up_a && !up_c && !a_lost_c -> a_lost_c = true; child_open = false; share_open = false }
  :: atomic { up_a && !up_o && !a_lost_o -> a_lost_o = true; call_open = false; state_a = FAILED }
  od
}

inline accept() {
  if
  :: up_a && !c_lost_a -> accepting = true; m_accept++
  :: else
  fi
}

active proctype Third() {
end:
  do
  :: atomic { up_c && m_share > 0 -> m_share--;
       if
       :: is_void || got_share
       :: !is_void && !got_share && c_lost_o -> got_share = true; state_c = FAILED; accept()
       :: !is_void && !got_share && !c_lost_o -> got_share = true; state_c = PENDING;
            if
            :: up_o -> m_fork++
            :: else
            fi
       fi }
  :: atomic { up_c && k_fork > 0 -> k_fork--; fork_done = true;
       if
       :: state_c == PENDING -> state_c = CONFIRMED;
            assert(!up_o || fork_c == LIVE);                            /* RREF-3 */
            assert(!up_o || !released);                                 /* RREF-1 */
            /* Early, or with the handler's answer, which may be lost. */
            if
            :: accept()
            :: !accept_now && up_a -> m_shared++
            fi
       :: else
       fi }
  :: atomic { up_c && k_fork_no > 0 -> k_fork_no--; fork_done = true;
       if
       :: state_c == PENDING -> state_c = FAILED; accept()
       :: else
       fi }
  :: atomic { up_c && state_c == CONFIRMED && !used_c && up_o -> used_c = true; waits_c = true; m_use++ }
  :: atomic { up_c && (k_use > 0 || k_use_error > 0) ->
       if
       :: k_use > 0 -> k_use--; assert(started)
       :: k_use == 0 -> k_use_error--
       fi;
       waits_c = false }
  :: atomic { up_c && k_use_gone > 0 -> k_use_gone--;
       assert(!waits_c);                                                /* RREF-1: no use after delete */
     }
  :: atomic { up_c && state_c == CONFIRMED && !waits_c -> state_c = DROPPED; deleting_c = true;
       if
       :: delete_c_floor = true
       :: delete_c_floor = false  /* something older is not settled */
       fi;
       if
       :: up_o -> m_delete_c++
       :: else
       fi }
  :: atomic { up_c && k_delete_c > 0 -> k_delete_c--; delete_c_done = true }
  :: atomic { up_c && k_accept > 0 -> k_accept--; accept_done = true }
  :: atomic { up_c && m_audit > 0 -> m_audit--;
       if
       :: !up_a
       :: up_a && state_c == NONE -> is_void = true; k_audit_none++
       :: up_a && state_c == PENDING -> accept_now = true; k_audit_pending++
       :: up_a && state_c == CONFIRMED -> k_audit_held++
       :: up_a && (state_c == FAILED || state_c == DROPPED) -> k_audit_none++
       fi }
  :: atomic { up_c && !up_a && !c_lost_a -> c_lost_a = true }
  :: atomic { up_c && !up_o && !c_lost_o -> c_lost_o = true; waits_c = false;
       if
       :: state_c == PENDING -> state_c = FAILED; accept()
       :: else -> state_c = (state_c == NONE -> NONE : FAILED)
       fi }
  od
}

#define LOSE(m) atomic { m > 0 && losses > 0 -> losses--; m-- }
#define REPEAT(m) atomic { m > 0 && repeats > 0 -> repeats--; m++ }
#define AGAIN(wanted, done, m, k) atomic { (wanted) && !done && m == 0 && (k) == 0 -> m++ }

active proctype Network() {
end:
  do
  :: LOSE(m_create) :: LOSE(m_answer) :: LOSE(m_known) :: LOSE(m_abandon) :: LOSE(k_abandon)
  :: LOSE(m_delete_a) :: LOSE(k_delete_a) :: LOSE(m_share) :: LOSE(m_shared) :: LOSE(m_accept)
  :: LOSE(k_accept) :: LOSE(m_audit) :: LOSE(k_audit_none) :: LOSE(k_audit_held)
  :: LOSE(k_audit_pending) :: LOSE(m_fork) :: LOSE(k_fork) :: LOSE(k_fork_no) :: LOSE(m_delete_c)
  :: LOSE(k_delete_c)
  :: REPEAT(m_create) :: REPEAT(m_known) :: REPEAT(m_abandon) :: REPEAT(m_delete_a)
  :: REPEAT(m_accept) :: REPEAT(m_audit) :: REPEAT(m_fork) :: REPEAT(k_fork) :: REPEAT(m_delete_c)
  :: AGAIN(abandoned && up_a && up_o, abandon_done, m_abandon, k_abandon)
  :: AGAIN(deleting_a && up_a && up_o && !a_lost_o, delete_a_done, m_delete_a, k_delete_a)
  :: AGAIN(accepting && up_a && up_c, accept_done, m_accept, k_accept)
  :: AGAIN(auditing && up_a && up_c, audit_done, m_audit, k_audit_none + k_audit_held + k_audit_pending)
  :: AGAIN(state_c == PENDING && up_c && up_o && !c_lost_o, fork_done, m_fork, k_fork + k_fork_no)
  :: AGAIN(deleting_c && up_c && up_o, delete_c_done, m_delete_c, k_delete_c)
  :: atomic { crashes > 0 ->
       crashes--;
       if
       :: up_a = false; m_answer = 0; m_known = 0; k_abandon = 0; k_delete_a = 0; m_shared = 0;
          m_accept = 0; k_audit_none = 0; k_audit_pending = 0; k_audit_held = 0
       :: up_c = false; m_share = 0; k_accept = 0; m_audit = 0; k_fork = 0; k_fork_no = 0;
          k_delete_c = 0; k_use = 0; k_use_error = 0; k_use_gone = 0
       :: up_o = false; m_create = 0; m_abandon = 0; m_delete_a = 0; m_next = 0; m_fork = 0;
          m_delete_c = 0; m_use = 0
       fi }
  od
}

active proctype Monitor() {
  do
  /* At any time. */
  :: atomic { deleted_a && fork_a == LIVE && !o_lost_a -> assert(false) }  /* RREF-2 */
  :: atomic { deleted_c && fork_c == LIVE && !o_lost_c -> assert(false) }  /* RREF-2 */
  /* Nothing more can happen: the network is quiet, all handles are dropped. */
  :: atomic { timeout ->
       assert(!up_a || (!has_a && !child_open && !call_open));          /* RREF-6 */
       assert(!up_c || (state_c != PENDING && state_c != CONFIRMED));   /* RREF-6 */
       assert(!up_c || !waits_c);                 /* the value was delivered, or the error (RREF-8) */
       assert(!up_o || (fork_a != LIVE && fork_c != LIVE && !running && !parked));  /* RREF-6 */
       assert(!up_o || !started || released);     /* RREF-1: no leak */
       assert(!(up_o && up_a && floor_a && fork_a == TOMBSTONE));       /* RREF-6 */
       break }
  od
}
