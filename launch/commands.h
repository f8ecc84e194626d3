/* commands.h - the commands of the program; each parses its own flags and returns an exit code. */
#ifndef OPROJ_LAUNCH_COMMANDS_H
#define OPROJ_LAUNCH_COMMANDS_H

int cmd_info(int argc, char **argv);
int cmd_synth(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_split(int argc, char **argv);
int cmd_run(int argc, char **argv);

#endif /* OPROJ_LAUNCH_COMMANDS_H */
