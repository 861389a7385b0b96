#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "confine/confine.h"
#include "test.h"

TEST(whose_parent_has_ended_is_a_child_of_this_one)
{
    int told[2];
    pid_t orphan = 0;

    CHECK_EQ(mo_adopt_orphans(NULL), MO_OK);
    CHECK_EQ(pipe(told), 0);
    const pid_t child = fork();
    if (!child) {
        orphan = fork();
        if (!orphan) {
            setsid();
            pause();
        }
        _exit(write(told[1], &orphan, sizeof orphan) != sizeof orphan);
    }
    CHECK_EQ(read(told[0], &orphan, sizeof orphan), sizeof orphan);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK_EQ(waitpid(orphan, NULL, WNOHANG), 0);
    kill(orphan, SIGKILL);
    CHECK_EQ(waitpid(orphan, NULL, 0), orphan);
}

TEST_MAIN
