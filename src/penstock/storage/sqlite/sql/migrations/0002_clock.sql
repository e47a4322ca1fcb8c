-- The clocks as they were at now_ms, and their history (clock.py). clock_ms is the wall clock with shift_ms; 0: not read
-- yet. boot_ms counts from the start of the machine that boot stands for.
ALTER TABLE queues ADD COLUMN clock_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE queues ADD COLUMN boot_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE queues ADD COLUMN boot INTEGER NOT NULL DEFAULT 0;
ALTER TABLE queues ADD COLUMN clock_marks TEXT NOT NULL DEFAULT '';
