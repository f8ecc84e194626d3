/* log.h - one line on stderr for what a user may want to know while it happens.
 *
 * OPROJ_LOG = error | warn | info | debug chooses the level (default warn).  Lines look like
 * "oproj[3] info: ..." with the rank once it is known. */
#ifndef OPROJ_BASE_LOG_H
#define OPROJ_BASE_LOG_H

typedef enum oproj_base_level {
  OPROJ_LOG_ERROR,
  OPROJ_LOG_WARN,
  OPROJ_LOG_INFO,
  OPROJ_LOG_DEBUG
} oproj_base_level;

/* Tags later lines of this process with a rank; a negative one removes the tag. */
void oproj_base_log_rank(int rank);

void oproj_base_log(oproj_base_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif /* OPROJ_BASE_LOG_H */
