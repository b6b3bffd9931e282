-- What version 2 adds: the starts of the process, what each of them reopened, and which settings changed.

CREATE TABLE runs (
    run           INTEGER PRIMARY KEY,  -- one row for each start of `train` on this folder; the first is 1
    time          INTEGER NOT NULL,
    version       TEXT    NOT NULL,     -- of draftmill
    settings      TEXT    NOT NULL,     -- SHA-256 of run.toml
    resumed_from  INTEGER NOT NULL,     -- step of the checkpoint that it went on from, 0 at the beginning
    reopened      INTEGER NOT NULL,     -- jobs that it opened again
    epochs        INTEGER NOT NULL,     -- run.epochs
    samples       INTEGER NOT NULL,     -- of an epoch
    micro_batches INTEGER NOT NULL,     -- of a step: optimizer.accumulation times drafters
    ended         INTEGER,              -- NULL while it goes on, and for good after a kill
    outcome       TEXT,                 -- finished, step-limit, stopped or failed
    step          INTEGER,              -- optimizer steps in the weights at the end
    problem       TEXT,                 -- of a failed one
    CHECK ((ended IS NULL) = (outcome IS NULL))
) STRICT;

CREATE TABLE reopened (
    epoch    INTEGER NOT NULL,
    idx      INTEGER NOT NULL,
    run      INTEGER NOT NULL REFERENCES runs,  -- the start that took this outcome back
    step     INTEGER,                           -- the outcome, as in `outcomes`
    reason   TEXT,
    attempts INTEGER,
    PRIMARY KEY (epoch, idx, run),
    FOREIGN KEY (epoch, idx) REFERENCES jobs
) STRICT, WITHOUT ROWID;

CREATE TABLE config_changes (
    id   INTEGER PRIMARY KEY,
    run  INTEGER NOT NULL REFERENCES runs,
    time INTEGER NOT NULL,
    step INTEGER NOT NULL,  -- optimizer steps that were in the weights
    key  TEXT    NOT NULL,  -- section.key
    old  TEXT    NOT NULL,  -- TOML
    new  TEXT    NOT NULL
) STRICT;
