/* commands.h - the commands of the program.  Each gets its own words, argv[0] being its name, and
 * returns a status whose sentence is the last error; job->code says how a success ends. */
#ifndef OPROJ_LAUNCH_COMMANDS_H
#define OPROJ_LAUNCH_COMMANDS_H

#include "job/job.h"

/* COLLECTIVE. */
oproj_status cmd_info(job_state *job, int argc, char **argv);
oproj_status cmd_run(job_state *job, int argc, char **argv);

/* Work of one process. */
oproj_status cmd_synth(job_state *job, int argc, char **argv);
oproj_status cmd_inspect(job_state *job, int argc, char **argv);
oproj_status cmd_split(job_state *job, int argc, char **argv);

#endif /* OPROJ_LAUNCH_COMMANDS_H */
